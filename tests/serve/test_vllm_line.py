"""A `vllm serve` line with a key, in real processes: nobody gets in without it, and the printed `curl` answers.

The worker's engine has no model; keys and flags are those of `semel serve`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from semel.lab.bench.ports import free_port
from tests.serve.served import Served, until
from tests.serve.test_draining import started, until_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

KEY = "token-abc123"
CONFIG = "root-path: /llm\nuvicorn-log-level: warning\nport: 1\npreprocessing-processes: 1\nrate: 50\n"


def test_vllms_variable_closes_the_server_and_the_printed_curl_answers(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong implementation was open with the variable, and its printed `curl` was answered with 401."""
    (tmp_path / "flags.yaml").write_text(CONFIG)
    port = free_port()
    line = ["--config", str(tmp_path / "flags.yaml"), "--port", str(port)]
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with started(tmp_path, "testing", "serve", str(tiny("qwen2-vl")), *line) as process:
        served = Served(process, f"http://127.0.0.1:{port}", tmp_path, tmp_path / "testing.log", 0.0)
        until_ready(served)
        until(lambda: "Ctrl-C ends it" in served.log.read_text(), 10)
        for key, expected in (("", 401), ("wrong", 401), (KEY, 200)):
            for prefix in ("", "/llm"):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                assert httpx.get(f"{served.url}{prefix}/v1/models", headers=headers).status_code == expected
        text = served.log.read_text()
        assert KEY not in text
        assert "an API key has 12 characters" in text
        assert "--uvicorn-log-level is ignored" in text
        (printed,) = re.findall(r"^  (curl .*)$", text, re.MULTILINE)
        command = ["bash", "-c", f"{printed} -s"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"API_KEY": KEY})
        assert '"object":"chat.completion"' in done.stdout.replace(" ", ""), done.stdout
