"""What the tests on real engines share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.engine.engines import Engines


@pytest.fixture(scope="session")
async def engines(tiny: Callable[[str], Path]) -> AsyncIterator[Engines]:
    """The engine that runs, and how to get another one."""
    shared = Engines(tiny)
    yield shared
    await shared.close()
