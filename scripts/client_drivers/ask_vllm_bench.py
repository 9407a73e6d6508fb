"""`vllm bench serve`, vLLM's own benchmark. Its requests are all streams."""

import json
import tempfile
from pathlib import Path
from typing import Any

from benching import EXTRAS, PROMPT_TOKENS, REQUESTS, run, tokens
from driver import server, tell

SERVER = server()
BENCH = (  # `vllm bench serve` without the command `vllm`, which asks for a version that only GPU builds have
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def bench(request: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        command = ["python", "-c", BENCH, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        command += ["--base-url", SERVER.url, "--model", SERVER.model, "--tokenizer", SERVER.folder, "--seed", "1"]
        command += ["--num-prompts", str(REQUESTS), "--max-concurrency", "2", "--disable-tqdm"]
        command += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(tokens(request))]
        command += ["--extra-body", json.dumps(EXTRAS[request]), "--save-result", "--save-detailed"]
        command += ["--result-dir", folder, "--result-filename", "result.json"]
        command += ["--dataset-name", "random-mm" if request == "image" else "random"]
        if request == "image":
            command += ["--random-mm-base-items-per-request", "1", "--random-mm-limit-mm-per-prompt", '{"image": 1}']
            command += ["--random-mm-num-mm-items-range-ratio", "0", "--random-mm-bucket-config", "{(56, 56, 1): 1.0}"]
        run(command, Path(folder))
        found = json.loads((Path(folder) / "result.json").read_text())
    names = ("completed", "failed", "total_input_tokens", "total_output_tokens", "input_lens", "output_lens")
    return {name: found[name] for name in (*names, "generated_texts", "errors")}


if __name__ == "__main__":
    for one in EXTRAS:
        tell("chat", one, lambda one=one: bench(one))
