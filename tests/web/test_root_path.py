"""A path prefix of a proxy: every route answers with it and without."""

from __future__ import annotations

from typing import Any

import pytest

from semel.web.host_check import RootPath


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/llm/v1/models", "/v1/models"),
        ("/v1/models", "/v1/models"),
        ("/llmx/v1/models", "/llmx/v1/models"),
        ("/llm/llm/health", "/llm/health"),
        ("/llm", "/llm"),
    ],
)
@pytest.mark.parametrize("prefix", ["/llm", "llm/"])
async def test_one_prefix_is_taken_off(path: str, seen: str, prefix: str) -> None:
    paths = []

    async def app(scope: Any, *_: Any) -> None:
        paths.append((scope["path"], scope.get("raw_path")))

    scope = {"type": "http", "path": path, "raw_path": path.encode()}
    await RootPath(app, prefix)(scope, None, None)  # type: ignore[arg-type]
    assert paths == [(seen, None if seen != path else path.encode())]
    assert scope["path"] == path, "the server's own scope is left as it is"


async def test_what_is_no_request_passes() -> None:
    seen: list[Any] = []

    async def app(scope: Any, *_: Any) -> None:
        seen.append(scope)

    await RootPath(app, "/llm")({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]
