"""vLLM's flags before vLLM is imported: what its parser would refuse, and nothing that it would take."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from inspect import unwrap

import pytest

from semel.cli.checks.engine_flags import read_engine_flags
from semel.engine.vllm.compat.flags import FlagSource
from semel.engine.vllm.compat.source import SourceTree
from semel.engine.vllm.compat.versions import installed_version

pytestmark = pytest.mark.skipif(not installed_version(), reason="vLLM is not installed")

OWN = ("--port", "--host", "--workers")
SOURCE = FlagSource.installed()
"""Parsed once, not for every line."""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--prot 8001", "unknown flag --prot: did you mean --port?"),
        ("--max_modle_len=4096", "unknown flag --max_modle_len: did you mean --max-model-len?"),
        ("--workerz 2", "unknown flag --workerz: did you mean --workers?"),
        ("--enable-auto-tool-choise", "did you mean --enable-auto-tool-choice?"),
        ("--quite-another 9", "unknown flag --quite-another: neither semel nor vLLM's engine has it"),
        ("--middleware a.b", "--middleware cannot be used: semel loads no code of others"),
        ("--max-num 3", "--max-num could be any of --max-num-active-seqs, "),
        ("--max-model-len", "--max-model-len needs a value"),
        ("--max-model-len --enforce-eager", "--max-model-len needs a value"),
        ("--enforce-eager true", "'true' is no flag"),
        ("--enforce-eager=true", "--enforce-eager takes no value"),
        ("-tp 0", "-tp 0: must be at least 1"),
        ("--scheduling-policy priorities", "did you mean priority? It must be one of fcfs, priority"),
        ("--reasoning-parser qwen", "--reasoning-parser qwen: vLLM has no such parser; did you mean qwen3"),
    ],
)
def test_what_vllms_parser_would_refuse_is_told_with_what_was_meant(line: str, complaint: str) -> None:
    problems = read_engine_flags(line.split(), OWN, SOURCE).problems
    assert [one for one in problems if complaint in str(one)], problems


@pytest.mark.parametrize(
    "line",
    [
        "--max-model-len 8k --max_num_seqs=4 --seed -1 --no-enable-prefix-caching",
        "--served-model-name a b c -tp 2 -O3 -O 2 -q fp8",
        "--limit-mm-per-prompt.image 2 --compilation-config.mode 3 --max-model-len auto",
        """--limit-mm-per-prompt {"image":2} --kv-cache-memory-bytes 4G --tool-call-parser hermes""",
        "--tool-call-parser mine --tool-parser-plugin mine.py --enable-auto-tool-choice",
        "--gpu-memory-util 0.5 --config flags.yaml --tokenizer None",
    ],
)
def test_what_vllms_parser_takes_is_left_alone(line: str) -> None:
    assert read_engine_flags(line.split(), OWN, SOURCE).problems == ()


def test_values_are_known_by_every_spelling() -> None:
    flags = read_engine_flags(
        ["-tp", "2", "--kv-cache-memory-bytes", "4G", "--max-model-len", "8k", "--no-enforce-eager"]
    )
    assert flags.number("--tensor-parallel-size") == flags.number("-tp") == 2
    assert flags.number("--kv-cache-memory-bytes") == 4 << 30
    assert flags.number("--max-model-len") == 8_000
    assert not flags.is_on("--enforce-eager")
    assert flags.number("--seed") is None


def test_a_source_that_is_not_as_we_know_it_has_no_flags_and_no_complaints() -> None:
    """The control is the source that is installed."""
    other = FlagSource(SourceTree("vllm", {"vllm/engine/arg_utils.py": "class EngineArgs: ..."}.get))
    assert read_engine_flags(["--anything"], source=other).problems == ()
    assert read_engine_flags(["--anything"]).problems


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from semel.cli.checks import start; from semel.cli.checks.engine_flags import read_engine_flags;"
        "found = {'vllm', 'torch', 'transformers'} & set(sys.modules);"
        "print(len(read_engine_flags(['--prot', '1']).problems), *found)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


@pytest.mark.slow
def test_the_source_says_what_vllms_own_parser_says() -> None:
    """Every spelling, and of those whose values are checked, the type and the choices. Many take `None`, too."""
    program = """
import inspect, json
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int, human_readable_int_or_auto
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
kinds = {int: "integer", float: "number", human_readable_int: "integer", human_readable_int_or_auto: "integer"}
def plain(kind):
    return inspect.getclosurevars(kind).nonlocals.get("return_type", kind) if inspect.isfunction(kind) else kind
print(json.dumps([
    [
        action.option_strings, kinds.get(plain(action.type), ""), sorted(map(str, action.choices or ())),
        action.nargs == 0,
    ]
    for action in parser._actions if "--help" not in action.option_strings
]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    actions = json.loads(done.stdout.splitlines()[-1])
    source = FlagSource.installed()
    assert source is not None
    theirs = {spelling for spellings, *_ in actions for spelling in spellings if not spelling.startswith("--no-")}
    assert set(source.spellings) == theirs
    for spellings, kind, choices, is_switch in actions:
        ours = source.flag(spellings[0])
        if ours.kind in ("integer", "number"):
            assert kind == ours.kind, spellings
        elif ours.kind == "choice":
            assert set(choices) - {"None"} <= set(ours.choices), spellings
        assert (ours.kind == "switch") == is_switch, spellings


def test_source_is_parsed_while_tasks_that_failed_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tracebacks are formatted by Python's parser, which 3.11 cannot enter twice: `source._parse`."""
    monkeypatch.setattr(ast, "parse", unwrap(ast.parse))  # without the tests' own care for it

    async def fail() -> None:
        raise KeyError(len("1") + 1)

    async def forget() -> None:
        ring: list[object] = [asyncio.create_task(fail())]
        ring.append(ring)  # so that only a garbage collection finds it
        await asyncio.sleep(0.01)

    asyncio.run(forget())
    assert FlagSource.installed() is not None
