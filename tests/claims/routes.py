"""Routes that pages name are served, or the page is one that says they are not."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, cast

from semel.core import Keyring
from semel.frontend.app import create_app
from semel.frontend.routes.unsupported import UNSUPPORTED
from semel.frontend.service import FrontendState
from semel.telemetry import Meter
from semel.worker.admin import create_admin_app
from tools.pages import Pages, code_lines, vllm_folder

SAY_SO: Final = (
    *("docs/api/routes.md", "docs/get-started/c*.md", "docs/use-cases/rollouts.md", "docs/operate/upgrading.md"),
    *("docs/security/threats.md", "docs/project/questions.md", "docs/get-started/questions.md"),
)
"""The pages that may name routes of vLLM's that semel has not, to say so."""

OF_OTHERS: Final = frozenset({"/v1/traces"})
"""Routes of programs that semel sends to: a collector of traces."""

_FOLDERS: Final = "dev|tmp|proc|run|etc|home|var|usr|opt|sys|models?|data|path|mnt|srv|root|lib|bin|keys|cache"
_BEFORE: Final = r"(?:^|(?<=[ \"'(,])|(?<=[a-z0-9]:\d{4})|(?<=HOST)|(?<=THERE)|(?<=URL))"
ROUTE: Final = re.compile(rf"{_BEFORE}(/(?!(?:{_FOLDERS})\b)[a-z][\w/{{}}-]*(?:\.json)?)(?![\w.*…])")


@cache
def served_routes() -> frozenset[str]:
    """Every route of a frontend and of a worker's admin address, but those that only say no."""
    frontend = create_app(FrontendState(), Meter(), Keyring([("somebody", "a-key-that-opens-nothing")]))
    nobody = cast("Any", SimpleNamespace(engine=None))
    worker = create_admin_app(nobody, Meter(), key=None, count=nobody, reset=nobody, control=nobody, adapters=nobody)
    return frozenset(route.path for one in (frontend, worker) for route in one.routes) - UNSUPPORTED.keys()  # type: ignore[attr-defined]


@cache
def vllm_routes() -> frozenset[str]:
    """Every route of vLLM's servers, read from their source."""
    sources = (path.read_text() for path in vllm_folder().glob("entrypoints/**/*.py"))
    return frozenset(route for text in sources for route in re.findall(r"(?:router|app)\.\w+\(\s*\"(/[^\"]+)\"", text))


def missing_routes(page: str) -> Iterator[str]:
    """The routes of the OpenAPI document that the page of routes has not."""
    named = {route for line in code_lines(page) for route in ROUTE.findall(line)}
    for route in create_app(FrontendState(), Meter()).openapi()["paths"]:
        if route not in named:
            yield f"{route}: not on the page"


def wrong_routes(pages: Pages) -> Iterator[str]:
    """Routes in code that nothing serves."""
    served = served_routes() | UNSUPPORTED.keys() | OF_OTHERS
    for page, text in pages.items():
        known = served | vllm_routes() if any(fnmatch.fnmatch(page, one) for one in SAY_SO) else served
        for code in code_lines(text):
            for route in ROUTE.findall(code):
                if route.rstrip("/") not in ("", "/v1") and not any(is_route(route, one) for one in known):
                    yield f"{page}: {route}: there is no such route"


def is_route(route: str, known: str) -> bool:
    """Whether a route is a known one, or how one ends (`/render`); a name in braces stands for any."""
    pattern = re.sub(r"\\{\w+\\}", r"[\\w{}-]+", re.escape(known))
    return re.fullmatch(rf"(?:/.*)?{pattern}", route) is not None or known.endswith(route)
