"""What tests of servers share: a start of two engines each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.serve.both import Both, serving_both
from tests.serve.speaking import speaking

FLAGS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


@pytest.fixture(scope="session")
def both(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """`semel serve` and bare vLLM's server, for all files of the group `openai`."""
    home = tmp_path_factory.mktemp("both")
    with serving_both(speaking(tiny("qwen2-vl"), home / "model"), home, *FLAGS) as made:
        yield made
