"""vLLM's engine in process, the floor under every server: `python -m semel.lab.bench.serving.floor MODEL [FLAGS]`.

A process with an `AsyncLLM` reads chats from its standard input, one to a line. vLLM's own renderer makes a prompt of
each, with the earlier items by hash; that is not timed. The engine is: from the prompt to the first token.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import IO, Any, Final

from semel.errors import ConfigError
from semel.lab.bench.serving.procfs import cpu_s, descendants
from semel.lab.bench.serving.servers import Launch, end_process

__all__ = ["EngineAnswer", "Floor", "engine_in_process"]

_START_S: Final = 1_800.0
_ANSWER_S: Final = 300.0
_TAIL_CHARS: Final = 3_000


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The time that the engine took for a chat."""

    seconds: float
    cpu_s: float
    """Of all its processes."""

    prompt_tokens: int


class Floor:
    """The engine's process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Any) -> None:
        self._process = process
        self._log = log
        self.max_tokens = 0
        """Of a prompt and its answer."""

    async def start(self) -> None:
        """Wait until the engine is ready."""
        self.max_tokens = int((await asyncio.to_thread(self._read, _START_S))["max_tokens"])

    async def ask(self, body: bytes) -> EngineAnswer:
        """Let the engine answer a chat."""
        return EngineAnswer(**await asyncio.to_thread(self._ask, body))

    def _ask(self, body: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(body + b"\n")
        self._process.stdin.flush()
        return self._read(_ANSWER_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready or not (line := self._process.stdout.readline()):
            tail = self._log.read_text(errors="replace")[-_TAIL_CHARS:]
            raise ConfigError(f"vLLM's engine in process has ended or hangs:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def engine_in_process(launch: Launch) -> AsyncIterator[Floor]:
    """A process with the engine of the bare side, ready."""
    home = launch.scratch / "floor"
    home.mkdir()
    log = home / "log"
    folders = {"TMPDIR": str(home), "VLLM_RPC_BASE_PATH": str(home)}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220, S603 (uvloop's own knows no process group)
            [sys.executable, "-m", "semel.lab.bench.serving.floor", launch.model, *launch.flags],
            env=os.environ | {"SEMEL": "0"} | dict(launch.environment) | folders,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            process_group=0,
        )
    floor = Floor(process, log)
    try:
        await floor.start()
        yield floor
    finally:
        await end_process(process)


async def _serve(model: str, flags: Sequence[str], answers: IO[str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args, _ = parser.parse_known_args(["--model", model, *flags])
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    async def render(body: bytes) -> tuple[Any, Any]:
        request = ChatCompletionRequest.model_validate_json(body)
        options = request.mm_processor_kwargs
        chat = request.build_chat_params(None, "auto")
        chat = chat.with_defaults(default_mm_processor_kwargs=options) if options else chat
        extras = {"mm_processor_kwargs": options} if options else {}
        tokens = request.build_tok_params(llm.model_config)
        _, (prompt,) = await llm.renderer.render_chat_async([request.messages], chat, tokens, prompt_extras=extras)
        return prompt, request.to_sampling_params(request.max_tokens, {})

    answer(max_tokens=llm.model_config.max_model_len)
    number = 0
    try:
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            prompt, params = await render(line)
            number += 1
            pids = descendants(os.getpid())
            spent_s, began = cpu_s(pids), perf_counter()
            async for _ in llm.generate(prompt, params, str(number)):
                break
            seconds, tokens = perf_counter() - began, len(prompt["prompt_token_ids"])
            answer(seconds=seconds, cpu_s=cpu_s(pids) - spent_s, prompt_tokens=tokens)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output, which has only answers
    import uvloop

    uvloop.run(_serve(sys.argv[1], sys.argv[2:], _answers))
