"""A frontend and vLLM's own HTTP server over an engine that already runs: what the two answer is compared."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from semel.core import Keyring
from tests.engine.engines import ShippedRig, Start
from tests.frontend.rig import Rig, rig

__all__ = ["KEYS", "ask_both", "frontend_of", "vllm_client"]

KEYS: Final = {"one": "a" * 32, "two": "b" * 32}
"""By tenant."""


@asynccontextmanager
async def frontend_of(engine: ShippedRig, folder: Path) -> AsyncIterator[Rig]:
    """A frontend of the engine; one for all tests, since a worker watches the engine for good."""
    keys = Keyring(list(KEYS.items()))
    made: Any = lambda _: engine.engine  # noqa: E731
    async with rig(folder, engine.pipeline, make_engine=made, keys=keys) as app:
        yield app


async def ask_both(engine: ShippedRig, app: Rig, vllm: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """What vLLM's server and semel answer, each with empty caches."""
    answers = []
    for client in (vllm, app.client):
        await engine.engine.reset()
        response = await client.post(path, json=body, headers={"Authorization": f"Bearer {KEYS['one']}"})
        assert response.status_code == 200, response.text
        answers.append(response.json())
    return answers


@asynccontextmanager
async def vllm_client(rig: ShippedRig, start: Start) -> AsyncIterator[httpx.AsyncClient]:
    """A client of vLLM's app on this engine, which renders and scores by itself."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    names = ("--model", str(rig.folder), "--served-model-name", rig.engine.contract.model)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*names, *start.common, *start.flags])
    tasks = await rig.llm.get_supported_tasks()
    level, handlers = logging.root.level, logging.root.handlers.copy()
    app = build_app(args, tasks, rig.llm.model_config)
    logging.root.handlers = handlers  # a package that it imports lets others write errors only
    logging.root.setLevel(level)
    await init_app_state(rig.llm, app.state, args, tasks)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=60) as client:
        yield client
