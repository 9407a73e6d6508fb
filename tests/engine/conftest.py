"""What the tests on real engines share."""

from __future__ import annotations

import pytest

from tests.engine.parity import Rig


@pytest.fixture(scope="module", params=["hf", "vllm"])
def either(request: pytest.FixtureRequest, rig: Rig) -> Rig:
    """The module's engine, with the features of the HF processor and then with those of vLLM's."""
    return rig.through(request.param)
