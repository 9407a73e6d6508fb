"""vLLM's configurations: their flags, and those of CI on engines (the others: `scripts/matrix`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from semel.errors import ConfigError
from tools.engine.matrix import IN_CI, MATRIX, REFUSED, Refused, flags_of
from tools.engine.matrix_parity import run_configuration

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", MATRIX)
def test_vllm_knows_the_flags_of_a_configuration(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from semel.engine.vllm.arguments import parse_engine_flags

    one = MATRIX[name]
    for is_semel in (False, True):
        flags = flags_of(one, tmp_path, is_semel=is_semel)
        parse_engine_flags(str(tiny(one.model)), flags, encoder_planning=is_semel and one.encoder_planning)


@pytest.mark.parametrize("refused", REFUSED, ids=[one.name for one in REFUSED])
def test_what_semel_cannot_serve_is_refused_before_the_engine_loads(
    refused: Refused, tiny: Callable[[str], Path]
) -> None:
    from semel.engine.vllm.arguments import parse_engine_flags

    with pytest.raises(ConfigError, match=refused.reason):
        parse_engine_flags(str(tiny("qwen2-vl")), refused.flags)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", [*IN_CI, pytest.param("tp2-ngram", marks=pytest.mark.nightly)])
def test_semel_answers_as_bare_vllm_under_the_same_flags_and_planted_faults_are_found(
    name: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    one = MATRIX[name]
    result = run_configuration(one, tiny(one.model), tmp_path, 20)
    assert result.faults == []
