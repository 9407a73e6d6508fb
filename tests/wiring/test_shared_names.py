"""Names (`uuid`) over two processes of `semel frontend` and one folder: what one has answered, the other knows.

A frontend is killed with kill -9 as soon as it has answered. The control is the same without `--media-store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from semel.settings.secrets import create_key
from tests.wiring.processes import Places, Running, running
from tests.wiring.test_served_flags import image, parts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHAT = "/v1/chat/completions"
ACME, BETA = "sk-acme-0123456789abcdef", "sk-beta-0123456789abcdef"


@contextmanager
def fleet(home: Path, model: Path, *flags: object) -> Iterator[Callable[[], Running]]:
    """A worker, and a call that starts a frontend at it."""
    create_key(home / "key")
    (home / "keys").touch(mode=0o600)
    (home / "keys").write_text(f"acme {ACME}\nbeta {BETA}\n")
    with ExitStack() as stack:
        worker = ["testing", "worker", model, "--listen", f"ipc://{home}/w.sock", "--fleet-key-file", home / "key"]
        stack.enter_context(running("worker", home, *worker))
        started = iter(range(9))

        def start() -> Running:
            at = Places(home, model)
            words = ["frontend", model, "--worker", at.worker, "--fleet-key-file", home / "key", "--port", at.port]
            words += ["--api-keys-file", home / "keys", "--preprocessing-processes", 1, *flags]
            words += ["--drain-delay-s", 0, "--metrics-port", at.metrics_port]
            url, metrics = f"http://127.0.0.1:{at.port}", f"http://127.0.0.1:{at.metrics_port}"
            name = f"frontend {next(started)}"
            frontend = stack.enter_context(running(name, home, *words, url=url, metrics_url=metrics))
            frontend.until_ready()
            return frontend

        yield start


def kill(frontend: Running) -> None:
    family = [psutil.Process(frontend.process.pid), *psutil.Process(frontend.process.pid).children(recursive=True)]
    frontend.process.kill()
    frontend.process.wait(30)
    psutil.wait_procs(family, 30)


def ask(frontend: Running, part: dict[str, Any], key: str = ACME, **fields: object) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, **fields}
    reply = frontend.post(CHAT, body, key)
    return reply.status_code, "" if reply.status_code == 200 else reply.json()["error"]["code"]


def named(seed: int, name: str) -> dict[str, Any]:
    return {**parts(image(60, 60, seed=seed))[0], "uuid": name}


def alone(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None, "uuid": name}


def check_names_outlive_a_frontend(start: Callable[[], Running]) -> None:
    one, other = start(), start()
    assert ask(one, named(1, "screen")) == ask(one, named(1, "twice")) == (200, "")
    assert ask(one, named(1, "salted"), cache_salt="s") == (200, "")
    kill(one)
    assert ask(other, alone("screen")) == (200, ""), other.text[-2_000:]
    assert ask(other, alone("screen"), BETA) == ask(other, alone("never"), BETA) == (404, "unknown_media")
    assert ask(other, alone("salted")) == (404, "unknown_media")
    assert ask(other, alone("salted"), cache_salt="s") == (200, "")
    assert other.metric("semel_media_names_learned_total") == 2
    assert other.metric("semel_pool_processed_total") == 0, "no byte of it was sent here"

    again = start()
    assert ask(again, named(2, "screen"), BETA) == (200, "")
    assert ask(again, named(3, "twice")) == (200, ""), "bytes win"
    assert ask(again, alone("twice")) == (409, "ambiguous_media")
    kill(again)
    assert ask(other, alone("twice")) == (409, "ambiguous_media")
    assert ask(other, alone("screen"), BETA) == (200, "")
    assert other.metric("semel_media_names_unshared_total") == 0


def test_a_name_that_was_answered_is_known_at_the_other_frontend_after_kill_9_S12(
    tmp_path: Path, tiny: Callable[[str], Path]
) -> None:
    with fleet(tmp_path, tiny("qwen2-vl"), "--media-store", tmp_path / "store") as start:
        check_names_outlive_a_frontend(start)


@pytest.mark.nightly
def test_without_a_store_a_name_is_known_at_its_own_frontend_alone(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    with (
        fleet(tmp_path, tiny("qwen2-vl")) as start,
        pytest.raises(AssertionError, match="unknown_media"),
    ):
        check_names_outlive_a_frontend(start)
