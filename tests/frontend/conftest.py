"""The model folder and renderers of the tests of rendering, and an application over a pipeline that draws."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from semel.cache import LruCache
from semel.render import ChatRenderer
from tests.frontend.rig import Rig, rig
from tests.render.conftest import folder, parts_renderer
from tests.render.drawn import FEATURE_BYTES, Drawing

__all__ = ["app", "drawing", "folder", "parts_renderer"]


@pytest.fixture
def drawing(parts_renderer: ChatRenderer) -> Drawing:
    """Its cache has room for 8 items."""
    return Drawing(parts_renderer, LruCache(8 * FEATURE_BYTES))


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, drawing.pipeline) as made:
        yield made
