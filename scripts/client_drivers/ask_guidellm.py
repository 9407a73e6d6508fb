"""`guidellm`: vLLM's benchmark of deployments."""

import json
import tempfile
from pathlib import Path
from typing import Any

from benching import EXTRAS, PROMPT_TOKENS, REQUESTS, run, tokens
from driver import TOOL, server, tell

SERVER = server()


def bench(request: str) -> Any:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backend = {
            "kind": "openai_http",
            "target": SERVER.url,
            "model": SERVER.model,
            "request_format": "/v1/chat/completions",
            "stream": request == "stream",
            "extras": {"body": EXTRAS["text" if request == "tools" else request]},  # its tools are data
        }
        data: dict[str, Any] = {
            "kind": "synthetic_text",
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": tokens(request),
        }
        if request == "tools":
            data |= {"turns": 1, "tool_call_turns": [0], "tools": [TOOL]}
        if request == "image":
            data = {
                "kind": "synthetic_image",
                "width": 56,
                "height": 56,
                "format": "png",
                "output_tokens": tokens(request),
            }
        command = ["guidellm", "run", "--backend", json.dumps(backend), "--data", json.dumps(data)]
        command += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--tokenizer", json.dumps({"kind": "huggingface_auto", "model": SERVER.folder})]
        command += ["--output", json.dumps({"kind": "json", "path": str(folder / "found.json")}), "--disable-console"]
        run(command, folder)
        found = json.loads((folder / "found.json").read_text())
    (benchmark,) = found["benchmarks"]
    names = ("output", "tool_calls", "input_metrics", "output_metrics")
    done = [{name: one.get(name) for name in names} for one in benchmark["requests"]["successful"]]
    return {"successful": done, "failed": len(benchmark["requests"]["errored"])}


if __name__ == "__main__":
    for one in EXTRAS:
        tell("chat", one, lambda one=one: bench(one))
