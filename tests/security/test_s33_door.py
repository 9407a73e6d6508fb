"""S33: the door into plain vLLM opens no way around a key: vLLM's for HTTP, semel's for the worker's listener."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from semel.core import Key
from semel.fleet.worker import RemoteWorker
from semel.settings.secrets import create_key
from semel.wire.zmq import Backoff, FrontendLink
from tests.vllm_plugin.test_worker import home, serving
from tests.waiting import until

__all__ = ["home"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(580)]

PROGRAM = """
import json, os
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", "--api-key", "k" * 16])

def routes(app):
    return {(method, one.path) for one in app.routes for method in getattr(one, "methods", None) or ("WEBSOCKET",)}

before = routes(build_app(args, ("generate",)))
os.environ["SEMEL"] = "1"
from semel.vllm_plugin import register
register()

from starlette.testclient import TestClient
from semel.vllm_plugin.worker import WorkerPlugin

def added():
    app = build_app(args, ("generate",))
    return [(path, TestClient(app).request(method, path).status_code) for method, path in routes(app) - before]

found = added()
WorkerPlugin.attach_router = lambda self, app: app.add_api_route("/semel/items", lambda: "all of them")
print(json.dumps([len(before), found, added()]))
"""


def test_no_route_is_added_to_vllms_server_that_answers_without_its_key_S33(tmp_path: Path) -> None:
    """Control: a level that adds one outside of /v1 is found: vLLM asks for no key there."""
    create_key(tmp_path / "key")
    env = {"SEMEL_LISTEN": f"ipc://{tmp_path}/w.sock", "SEMEL_FLEET_KEY_FILE": str(tmp_path / "key")}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | env, check=False)
    assert result.returncode == 0, result.stderr[-3_000:]
    count, found, control = json.loads(result.stdout.splitlines()[-1])
    assert count > 10
    assert [path for path, status in found if status != 401] == []
    assert control == [["/semel/items", 200]]


async def test_the_listener_in_vllms_server_asks_for_the_keys_of_the_fleet_S33(
    tiny: Callable[[str], Path], home: Path
) -> None:
    """Control: with the right one the frontend of `serving` is connected."""
    async with serving(tiny("qwen2-vl"), home):
        backoff = Backoff(first_s=0.01, max_s=0.05)
        async with FrontendLink(f"ipc://{home}/w.sock", key=Key(bytes(32)), frontend_id="x", backoff=backoff) as link:
            stranger = RemoteWorker(link)
            running = asyncio.create_task(stranger.run())
            await until(lambda: stranger.refusal is not None)
            assert (stranger.refusal, stranger.is_connected) == ("key", False)
            running.cancel()
