"""vLLM's server flags: each is accounted for, and the page says what semel does with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from semel.cli.checks.engine_flags import read_engine_flags
from semel.core.flag import flags_of
from semel.engine.vllm.compat.flags import FlagSource, server_flags
from semel.engine.vllm.compat.server_flags import ENGINE_FLAGS, FORMER_FLAGS, SERVER_FLAGS, server_flag
from semel.engine.vllm.compat.source import SourceTree
from semel.engine.vllm.compat.versions import TESTED, installed_version
from semel.settings.serve import ServeSettings
from tools.server_flag_table import PAGE, page_with, table

PINNED: dict[str, list[str]] = json.loads((Path(__file__).parent / "server_flags.json").read_text())
"""The server flags of each supported vLLM, read from its wheel."""

OURS = {spelling for row in SERVER_FLAGS for spelling in row.spellings}
JSON_OR_APPENDED = {"--allowed-origins", "--allowed-methods", "--allowed-headers", "--middleware"}
"""Lists by their type; vLLM's parser has them take one value each."""

needs_vllm = pytest.mark.skipif(not installed_version(), reason="vLLM is not installed")


def installed() -> SourceTree:
    tree = SourceTree.installed("vllm")
    assert tree is not None
    return tree


def unaccounted(theirs: set[str]) -> set[str]:
    return theirs - OURS


def test_every_server_flag_of_every_supported_vllm_is_accounted_for() -> None:
    assert set(PINNED) == set(TESTED)
    for release, theirs in PINNED.items():
        assert unaccounted(set(theirs)) == set(), release
    assert set().union(*PINNED.values()) == OURS, "a row for a flag that no supported vLLM has"


def test_a_flag_that_a_new_vllm_has_is_found() -> None:
    assert unaccounted({*PINNED["0.32"], "--brand-new"}) == {"--brand-new"}


@needs_vllm
def test_the_flags_are_those_of_the_source_that_is_installed_and_take_as_many_values() -> None:
    theirs = server_flags(installed())
    assert unaccounted(set(theirs)) == set()
    assert len(theirs) >= 65
    for spelling, kind in theirs.items():
        row = server_flag(spelling)
        assert row is not None
        expected = {"switch": "switch", "list": "several"}.get(kind, "one")
        assert row.values == ("one" if spelling in JSON_OR_APPENDED else expected), spelling


def test_a_source_that_is_not_as_we_know_it_has_no_flags() -> None:
    assert server_flags(SourceTree("vllm", {"vllm/__init__.py": ""}.get)) == {}


@needs_vllm
def test_rows_about_engine_flags_are_about_flags_that_the_engine_has_and_former_ones_about_none() -> None:
    source = FlagSource.installed()
    assert source is not None
    assert {one for row in ENGINE_FLAGS for one in row.spellings} <= set(source.spellings)
    former = {one for row in FORMER_FLAGS for one in row.spellings}
    assert not former & {*source.spellings, *OURS}


def test_a_flag_that_is_taken_or_mapped_is_one_of_semels_or_goes_to_the_worker() -> None:
    own = {one.spelling for one in flags_of(ServeSettings)} | {"--config"}
    for row in (*SERVER_FLAGS, *ENGINE_FLAGS):
        if row.handling == "taken" and not row.is_engines:
            assert set(row.spellings) <= own
        if row.handling == "mapped":
            assert row.target in own
        assert row.note
        assert "\n" not in row.note


@needs_vllm
@pytest.mark.parametrize("flag", ["--max-log-len 5", "--enable-server-load-tracking", "--lora-modules a=b", "--uds s"])
def test_nothing_else_is_guessed_for_a_flag_of_the_server(flag: str) -> None:
    """The wrong implementation asked for --max-log-len: did you mean --max-model-len?"""
    assert not [one for one in read_engine_flags(flag.split()).problems if "did you mean" in str(one)]
    assert [one for one in read_engine_flags(["--max-lok-len", "5"]).problems if "did you mean" in str(one)]


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == page_with(table(), page), "run `python -m tools.server_flag_table`"
    assert page != page_with(table().replace("`--uds`", "`--udp`"), page)


@needs_vllm
@pytest.mark.slow
def test_the_source_names_what_vllms_own_parser_has() -> None:
    program = """
import json
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
def spellings(parser):
    return {one for action in parser._actions for one in action.option_strings if not one.startswith("--no-")}
theirs = spellings(make_arg_parser(FlexibleArgumentParser()))
print(json.dumps(sorted(theirs - spellings(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])) == set(server_flags(installed()))
