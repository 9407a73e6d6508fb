"""`aiperf`: NVIDIA's benchmark of servers."""

import json
import tempfile
from pathlib import Path
from typing import Any

from benching import EXTRAS, PROMPT_TOKENS, REQUESTS, run, tokens
from driver import server, tell

SERVER = server()


def bench(request: str) -> Any:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["aiperf", "profile", "--model", SERVER.model, "--url", SERVER.url, "--endpoint-type", "chat"]
        command += ["--tokenizer", SERVER.folder, "--request-count", str(REQUESTS), "--concurrency", "2"]
        command += ["--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(tokens(request))]
        command += ["--random-seed", "1", "--ui", "none", "--extra-inputs", json.dumps(EXTRAS[request])]
        command += ["--artifact-dir", str(folder), "--export-outputs-json", "--no-gpu-telemetry", "--no-server-metrics"]
        command += ["--streaming"] if request == "stream" else []
        command += ["--image-width-mean", "56", "--image-height-mean", "56"] if request == "image" else []
        # Offline, it takes even a folder for the name of a repository.
        run(command, folder, HF_HUB_OFFLINE="")
        (summary,) = folder.rglob("profile_export_aiperf.json")
        found = json.loads(summary.read_text())
        (outputs,) = folder.rglob("outputs.json")
        answers = [answer(one) for one in json.loads(outputs.read_text())["data"]]
    figures = {one: found[one]["avg"] for one in ("request_count", "output_sequence_length") if found.get(one)}
    return {**figures, "errors": found.get("error_summary"), "answers": answers}


def answer(found: dict[str, Any]) -> Any:
    """Without its times."""
    lengths = {name: value for name, value in found["metrics"].items() if name.endswith(("_length", "_count"))}
    return {"conversation": found["conversation_id"], "text": found["response_text"], **lengths}


if __name__ == "__main__":
    for one in EXTRAS:
        tell("chat", one, lambda one=one: bench(one))
