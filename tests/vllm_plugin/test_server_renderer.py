"""Items of a plain vLLM server are made in semel's pool: a decoder's crash costs one request, and no server."""

from __future__ import annotations

import io

import httpx
import psutil
import pytest

from tests.engine.parity import image_part
from tests.vllm_plugin.conftest import DoorServer
from tests.vllm_plugin.hostile_decoder.hostile_decoder import DEADLY
from tests.vllm_plugin.image_files import damaged_files, image_files, photo

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def ask(server: DoorServer, *files: bytes) -> httpx.Response:
    content = [*map(image_part, files), {"type": "text", "text": "What?"}]
    body = {
        "model": str(server.folder),
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
        "temperature": 0,
    }
    return httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)


def deadly_file() -> bytes:
    buffer = io.BytesIO()
    photo(77).save(buffer, "JPEG", comment=DEADLY)
    return buffer.getvalue()


def test_images_are_answered_alike_new_and_known(door_server: DoorServer) -> None:
    for data in (image_files()["png, 16 bits"], image_files()["jpeg, turned"]):
        first, second = ask(door_server, data), ask(door_server, data)
        assert (first.status_code, second.status_code) == (200, 200), first.text
        assert first.json()["choices"] == second.json()["choices"]
        assert first.json()["usage"] == second.json()["usage"]


def test_the_server_has_a_pool_of_sandboxed_processes(door_server: DoorServer) -> None:
    children = psutil.Process(door_server.process.pid).children(recursive=True)
    assert any("semel.processing.pool" in " ".join(child.cmdline()) for child in children)
    assert "items are preprocessed in" in door_server.log.read_text()


def test_damaged_files_are_answered_with_400_and_vllms_words(door_server: DoorServer) -> None:
    for kind, data in damaged_files().items():
        if not data:
            continue  # no data URL has nothing
        answer = ask(door_server, data)
        assert answer.status_code == 400, (kind, answer.text)
        assert "Failed to load image" in answer.text, kind


def test_a_file_that_crashes_its_decoder_is_answered_with_400_and_the_server_lives(door_server: DoorServer) -> None:
    pytest.importorskip("semel.vllm_plugin.images")  # without it vLLM's connector opens the file itself
    for _ in range(2):
        answer = ask(door_server, deadly_file())
        assert answer.status_code == 400, answer.text
        assert "crashes the process that decodes it" in answer.text
    assert ask(door_server, image_files()["png"]).status_code == 200
    assert door_server.process.poll() is None
