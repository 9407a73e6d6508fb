"""Every flag of every command: declared once, described, bounded, and still there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from semel.cli import help as help_pages
from semel.cli.flags import FlagCommand
from semel.cli.help import MAX_COMMON_FLAGS
from semel.core.flag import GROUPS, Flag, flags_of
from semel.engine.vllm import arguments
from semel.engine.vllm.compat.versions import installed_version
from semel.settings.frontend import FrontendSettings, ServingSettings
from semel.settings.serve import ServeSettings
from semel.settings.worker import WorkerSettings
from tests.cli.test_app import semel
from tests.commands import invoke, root_command

PINNED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "pinned_flags.json").read_text())
"""The flags and defaults that users have in their scripts. A new flag need not be here; none here may go or change."""

OF_VLLM = ("--served-model-name", "--max-model-len", "--tensor-parallel-size")


def commands(name: str = "", found: Any = None) -> dict[str, FlagCommand]:
    found = found or root_command()
    if hasattr(found, "commands"):
        return {
            path: one
            for child, below in found.commands.items()
            for path, one in commands(f"{name} {child}".strip(), below).items()
        }
    return {name: found}


COMMANDS = commands()


def help_of(name: str, width: int = 80, flag: str = "--help=all") -> str:
    environment = os.environ | {"COLUMNS": str(width)}
    done = invoke(*name.split(), flag, env=environment)
    assert done.exit_code == 0, done.output
    return done.output


def test_what_a_command_takes_is_what_is_declared() -> None:
    for name, found in COMMANDS.items():
        assert isinstance(found, FlagCommand), f"{name} is not made from a declaration"
        spelt = [one.metavar if one.param_type_name == "argument" else one.opts[0] for one in found.params]
        assert spelt == [one.spelling for one in found.flags], name
        assert not [one for one in found.params if getattr(one, "secondary_opts", [])], name


def test_every_flag_has_help_a_group_bounds_and_a_default_within_them() -> None:
    for one in (one for found in COMMANDS.values() for one in found.flags):
        assert one.help[0].isupper(), one.help
        assert one.help.endswith("."), one.help
        assert one.group in GROUPS
        assert one.min is not None or one.kind not in (int, float), one.spelling
        if one.default is not None and not one.is_required and one.kind is not bool:
            values = one.default if one.is_list else (one.default,)
            assert tuple(one.parse(str(value)) for value in values) == values


def test_no_flag_has_vanished_or_changed_its_default() -> None:
    for name, pinned in PINNED.items():
        now = {
            one.name if one.is_positional else one.spelling: "REQUIRED" if one.is_required else one.default
            for one in COMMANDS[name].flags
        }
        plain = {spelling: list(value) if isinstance(value, tuple) else value for spelling, value in now.items()}
        assert {spelling: plain.get(spelling, "gone") for spelling in pinned} == pinned, name


def test_help_cuts_no_name_and_keeps_to_the_width() -> None:
    for name, width in [*((name, 80) for name in COMMANDS), ("serve", 60), ("serve", 200)]:
        check_help(help_of(name, width), COMMANDS[name].flags, width)


def check_help(shown: str, flags: Sequence[Flag], width: int) -> None:
    lines = shown.splitlines()
    for one in flags:
        starts = [line for line in lines if re.match(rf"  {re.escape(one.spelling)}(\s|$)", line)]
        assert len(starts) == 1, f"{one.spelling} is not shown once"
    assert "…" not in shown.replace("file:///…", "")
    assert max(map(len, lines)) <= width


def flags_in(shown: str) -> list[str]:
    return re.findall(r"^  (--[\w-]+|[A-Z]+)(?:\s|$)", shown, re.MULTILINE)


def test_help_shows_at_most_25_flags_and_says_how_to_see_the_others() -> None:
    for name, found in COMMANDS.items():
        shown, flags = help_of(name, flag="--help"), found.flags
        listed = flags_in(shown)
        assert len(listed) <= MAX_COMMON_FLAGS == 25, name
        assert set(listed) >= {one.spelling for one in flags if one.is_required}, name
        if len(flags) > MAX_COMMON_FLAGS:
            assert f"{len(listed)} of {len(flags)} flags. --help=all shows all of them" in " ".join(shown.split())
            assert {"MODEL", "--host", "--port", "--api-key"} <= set(listed) or name == "worker"


def test_help_about_a_group_or_a_word_shows_what_belongs_to_it() -> None:
    tls = [one.spelling for one in COMMANDS["serve"].flags if one.group == "TLS"]
    assert flags_in(help_of("serve", flag="--help=tls")) == tls
    words = flags_in(help_of("frontend", flag="--help=drain"))
    assert words == ["--drain-delay-s", "--drain-s"]
    by_help = flags_in(help_of("frontend", flag="--help=Landlock"))
    assert by_help == ["--require-sandbox"]
    nothing = invoke("worker", "--help=nothing-like-it")
    assert (nothing.exit_code, "--help=all" in nothing.output) == (2, True)


@pytest.mark.skipif(not installed_version(), reason="vLLM is not installed")
def test_help_about_a_word_names_vllms_flags_with_it() -> None:
    shown = help_of("serve", flag="--help=prefix")
    assert "--enable-prefix-caching" in shown


def test_mutant_help_that_cuts_long_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(help_pages, "_name", lambda one: one.spelling[:21] + "…" * (len(one.spelling) > 21))
    with pytest.raises(AssertionError, match="is not shown once"):
        check_help(help_of("serve"), COMMANDS["serve"].flags, 80)


def test_mutant_a_command_that_declares_its_flag_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    other = typer.Typer()

    @other.command()
    def stray(port: int = 8000) -> None: ...

    monkeypatch.setitem(COMMANDS, "stray", typer.main.get_command(other))
    with pytest.raises(AssertionError, match="not made from a declaration"):
        test_what_a_command_takes_is_what_is_declared()


def test_serve_shows_its_groups_in_order_sizes_in_words_and_where_vllms_flags_are() -> None:
    shown = help_of("serve")
    headings = re.findall(r"^([A-Z][^:\n]*):$", shown, re.MULTILINE)
    assert headings == [group for group in GROUPS if group in headings]
    assert headings[0] == "Server"
    assert {"Media", "Limits", "TLS", "Embedding store", "Keys", "Logs, metrics and traces"} <= set(headings)
    assert "[default: 256 MiB]" in shown
    assert "268435456" not in shown
    assert "<" not in shown
    for passed_on in ("--admin-port", "--admin-key-file", "--encoder-planning", "--disable-lazy-mm-transfer"):
        assert passed_on in shown
    end = " ".join(shown.split("\n\n")[-1].split())
    assert all(name in end for name in OF_VLLM)
    assert "serve --help=engine` lists them" in end


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve", "m", "--port", "99999"], "--port 99999: must be a whole number from 0 to 65535"),
        (["serve", "m", "--max-body-bytes", "1 GB"], "--max-body-bytes 1 GB: must be a number of bytes or a size"),
        (["serve", "m", "--processor", "torch"], "--processor torch: must be one of auto, hf, vllm"),
        (["bench", "streams", "--rate", "0"], "--rate 0: must be a number, at least 0.1"),
    ],
)
def test_a_value_out_of_bounds_is_one_line_with_flag_value_and_bound(arguments: list[str], complaint: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert complaint in line


def test_every_bound_is_checked_on_the_command_line() -> None:
    for name, found in COMMANDS.items():
        required = [part for one in found.flags if one.is_required for part in _some(one)]
        for one in found.flags:
            if one.is_positional or one.kind not in (int, float):
                continue
            outside = [] if one.min is None else [one.min - 1]
            outside += [] if one.max is None else [one.max + 1]
            for value in outside:
                with pytest.raises(typer.BadParameter) as caught:
                    found.main([*required, f"{one.spelling}={value}"], name, standalone_mode=False)
                assert str(caught.value).startswith(f"{one.spelling} {value}: must be")
                assert one.bounds in str(caught.value)


def _some(one: Flag) -> list[str]:
    return ["x"] if one.is_positional else [one.spelling, "x"]


def test_what_serve_hands_to_its_worker_and_frontend_they_take() -> None:
    serving, worker = set(_keys(ServingSettings)), set(_keys(WorkerSettings))
    passed_on = set(_keys(ServeSettings)) - {"model", "fleet_key_file", "workers", "verbose"}
    assert passed_on == serving | (worker - {"model", "fleet_key_file", "listen"})
    assert serving <= set(_keys(FrontendSettings))


def _keys(kind: type) -> list[str]:
    keys = [one.key for one in flags_of(kind)]
    assert len(keys) == len(set(keys)), f"{kind.__name__} has a flag twice"
    return keys


def test_vllms_flags_are_listed_by_its_own_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "engine_help", lambda: "all of vLLM's flags")
    for name in ("serve", "worker", "bench serve"):
        done = invoke(*name.split(), "--help=engine")
        assert (done.exit_code, done.output) == (0, "all of vLLM's flags\n")
    assert invoke("frontend", "--help=engine").exit_code == 2


@pytest.mark.engine
def test_vllms_flags_are_there_whichever_they_are() -> None:
    done = semel("serve", "--help=engine")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in OF_VLLM)


def test_help_loads_no_server_and_no_model() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from semel.cli.app import app;"
        "assert CliRunner().invoke(app, ['serve', '--help']).exit_code == 0;"
        "print(*sorted(m for m in sys.modules if '.' not in m))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "transformers", "vllm", "numpy", "av", "fastapi", "uvicorn", "aiohttp", "prometheus_client"}
    assert not heavy & set(done.stdout.split())
