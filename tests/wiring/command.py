"""`python -m tests.wiring.command worker …`: the `semel` command whose worker runs an engine without a model.

All of `semel worker` is the shipped code, vLLM's parser of flags included, up to the call that starts vLLM's engine.
What that call gets is written into the file that `SEMEL_WIRING` names. The embedding store is asked once, at the start.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final
from unittest.mock import patch

from semel import cli
from semel.core import Adapter, Contract, Digest, Rendering, Submission, Target
from semel.errors import EngineFailed
from semel.fairness.turns import EngineWindow
from semel.lab.testing.pacing import PacedEngine, PacedStream
from semel.processing import find_folder
from semel.processing.probes import proven_fingerprint, run_probes
from semel.processing.processor import load_processor

__all__ = ["FAIL", "HANG", "HOLD", "MAX_TOKENS", "RECORD", "main"]

RECORD: Final = "SEMEL_WIRING"
"""The variable that names the file."""

MAX_TOKENS: Final = 600
HOLD, FAIL, HANG = 1_001, 1_002, 1_003
"""Seeds of requests: one that is never answered, one that fails, one with which the engine makes no step any more."""

_RATE: Final = 50.0
_STORED: Final = 8


class WiredEngine(PacedEngine):
    """What `semel worker` asks of vLLM's engine, without a model."""

    tier: Any = None
    adapters = None
    injection_refusal = ""
    grammars = SimpleNamespace(samples=tuple)
    item_cache = SimpleNamespace(evictions=0)
    capabilities: ClassVar[Mapping[str, str]] = {"lazy_transfer": "proven"}
    window = EngineWindow(sequences=1, step_tokens=MAX_TOKENS)

    @classmethod
    def start(cls, arguments: Any, *, processor: Any, parsers: object, grammars: Any) -> WiredEngine:
        """Load the model's processor, and write down what there is to start with."""
        del parsers
        given = {name: repr(value) for name, value in vars(arguments).items()}
        _write({"arguments": given, "processor": processor, "grammars": asdict(grammars)})
        target = Target("float32", rendering=Rendering(trust_remote_code=arguments.trust_remote_code))
        loaded = load_processor(processor, find_folder(arguments.model), target)
        probes = run_probes(loaded)
        contract = Contract(
            model=arguments.model,
            fingerprint=proven_fingerprint(loaded.fingerprint, probes),
            target=target,
            fields={},
            max_items=dict.fromkeys(loaded.modalities, 4),
            max_embeds=16_384,
            max_tokens=MAX_TOKENS,
            cache_bytes=1 << 28,
            probes=probes,
            adapters=(Adapter("law", "/adapters/law", "1", arguments.model),),
        )
        engine = cls(contract, rate=_RATE)
        engine.tier = SimpleNamespace() if arguments.ec_transfer_config is not None else None
        return engine

    async def submit(self, submission: Submission) -> PacedStream:  # type: ignore[override]
        """Do what the seed says."""
        match submission.sampling.get("seed"):
            case seed if seed == FAIL:
                raise EngineFailed("the engine failed the request, as asked")
            case seed if seed == HANG:
                self.progress.set_requests(1)
                await asyncio.Event().wait()
            case seed if seed == HOLD:
                await asyncio.Event().wait()
        return await super().submit(submission)

    async def warm(self) -> None:
        """Nothing is slow the first time."""

    async def load_adapters(self, _: object) -> None:
        """It has those of its contract."""

    async def log_statistics(self) -> None:
        """There are none."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing runs."""

    def count_items(self, queries: int, hits: int) -> None:
        """Nobody counts."""


async def _ask_store(self: Any) -> None:
    """Instead of `EmbeddingSync.run`: publish a few outputs, and write down how the sync is set."""
    _write({"fetch_s": self._fetch_s, "publish_after": self._publishing._publish_after})
    store = self._store_of(b"an encoder")

    def publish() -> None:
        for number in range(_STORED):  # some are the other node's, which never answers
            digest, data = Digest(bytes([number]) * 32), memoryview(bytearray(64))
            store.publish(digest, (4, 4, "torch.float32"), [data], lambda: True, time.monotonic() + 10)

    await asyncio.to_thread(publish)
    await asyncio.Event().wait()


async def _submit(self: Any, submission: Submission) -> PacedStream:
    stream: PacedStream = await self._engine.submit(submission)
    return stream


async def _drain(self: Any, within_s: float) -> None:
    """Nothing is to be published."""


def _write(values: dict[str, Any]) -> None:
    path = Path(os.environ[RECORD])
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def main() -> None:
    with (
        patch("semel.engine.vllm.engine.VllmEngine.start", WiredEngine.start),
        patch.multiple("semel.worker.embedding_sync.EmbeddingSync", run=_ask_store, submit=_submit, drain=_drain),
    ):
        cli.main()


if __name__ == "__main__":
    main()
