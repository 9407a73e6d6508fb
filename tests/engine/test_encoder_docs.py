"""The commands of docs/internals/encoder.md, as vLLM's own parser and scheduler take them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "encoder.md"
COMMANDS = re.findall(r"^\$ (vllm serve MODEL.*?)\n```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_gives_an_engine_with_our_parts(command: str, tiny: Callable[[str], Path]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from semel.engine.vllm.plugins.encoder_cache import EncoderCache, EncoderCacheConfig
    from semel.engine.vllm.tier.config import TierConfig, has_tier

    flags = shlex.split(command.replace("\\\n", ""))[3:]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(tiny("qwen2-vl")), *flags])
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    assert config.ec_manager_config.get_encoder_cache_manager_obj() is EncoderCache
    EncoderCacheConfig.parse(config.ec_manager_config.manager_config)
    if "--scheduler-cls" in flags:
        assert config.scheduler_config.get_scheduler_cls().__name__ == "create_scheduler"
    assert has_tier(config) == ("--ec-transfer-config" in flags)
    if has_tier(config):
        TierConfig.parse(config.ec_transfer_config.ec_connector_extra_config)


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 4
