"""vLLM's own HTTP server over an engine that already runs: what it answers is what semel is compared with."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.engine.engines import ShippedRig, Start

__all__ = ["vllm_client"]


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
