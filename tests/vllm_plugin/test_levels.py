"""The levels of the door: which are on, the one line that says so, and a vLLM that they do not fit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from semel.engine.vllm.compat.names import Name
from semel.engine.vllm.compat.source import SourceTree
from semel.vllm_plugin import levels, register
from semel.vllm_plugin.levels import LEVELS, VERDICT, LevelOff, open_door, parse_levels

FILES = {"vllm/__init__.py": "class Engine:\n    def run(self, prompt): ...\n"}
HAS = Name("vllm", "Engine.run", ("prompt",), "the test")
LOST = Name("vllm", "Engine.stop", (), "stopping")


class Level:
    """A level that says what it does, cannot work, or fails; and how often it was installed."""

    def __init__(self, says: str | Exception) -> None:
        self.says = says
        self.installed = 0

    def install(self) -> str:
        self.installed += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.DEBUG:
            self.lines.append(record.getMessage())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines that an operator sees. The door is opened in a process that inherits nothing."""
    monkeypatch.setenv(VERDICT, "")
    handler = Lines()
    level = levels.logger.level
    levels.logger.setLevel(logging.DEBUG)
    levels.logger.addHandler(handler)
    yield handler.lines
    levels.logger.removeHandler(handler)
    levels.logger.setLevel(level)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Level]:
    """Five levels and a vLLM of one file, which has the one name that is needed."""
    made = {
        "images": Level("images are lazy"),
        "renderer": Level("a pool preprocesses"),
        "repair": Level(RuntimeError("a bug")),
        "engine": Level("encoder cache on"),
        "worker": Level(LevelOff("SEMEL_LISTEN is not set")),
    }
    for level, module in LEVELS.items():
        monkeypatch.setitem(sys.modules, module, made[level])
    monkeypatch.setattr(levels, "NAMES", ())
    monkeypatch.setattr(levels, "DOOR_NAMES", (HAS,))
    monkeypatch.setattr(levels, "installed_version", lambda: "0.32.1")
    tree = SimpleNamespace(installed=lambda _: SourceTree("vllm", FILES.get))
    monkeypatch.setattr(levels, "SourceTree", tree)
    return made


def test_1_is_every_level_and_a_list_is_taken_in_the_order_of_the_levels() -> None:
    assert parse_levels("1") == ["images", "renderer", "repair", "engine", "worker"]
    assert parse_levels("engine, images,") == ["images", "engine"]


def test_one_line_says_what_is_on_and_why_the_rest_is_off(lines: list[str], fakes: dict[str, Level]) -> None:
    door = open_door("1")
    assert list(door.on) == ["images", "renderer", "engine"]
    (line,) = lines
    assert line == (
        "semel: images are lazy; a pool preprocesses; encoder cache on; "
        "off: repair (a fault of its own: RuntimeError: a bug), worker (SEMEL_LISTEN is not set)"
    )


def test_only_the_levels_that_are_named_are_installed(lines: list[str], fakes: dict[str, Level]) -> None:
    open_door("engine")
    assert lines == ["semel: encoder cache on"]
    assert [level for level, fake in fakes.items() if fake.installed] == ["engine"]


def test_the_processes_of_a_server_install_the_levels_and_neither_check_nor_write_again(
    lines: list[str], fakes: dict[str, Level], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_door("images")
    monkeypatch.setattr(levels, "SourceTree", None)  # reading the source would fail
    for _ in range(3):
        assert list(open_door("images").on) == ["images"]
    assert len(lines) == 1
    assert fakes["images"].installed == 4


def test_another_setting_than_that_of_the_verdict_is_checked_and_said(
    lines: list[str], fakes: dict[str, Level]
) -> None:
    """A notebook that had a typing error starts a server."""
    open_door("imagse")
    open_door("images")
    assert [line.split(":")[1] for line in lines] == [
        " the door stays shut, and vLLM runs as it is",
        " images are lazy",
    ]


def test_another_vllm_below_a_server_is_checked_for_itself(
    lines: list[str], fakes: dict[str, Level], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_door("images")
    monkeypatch.setattr(levels, "installed_version", lambda: "0.33.0")
    assert not open_door("images").on
    assert "vLLM 0.33.0 is installed" in lines[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"setting": "images,magic"}, "SEMEL=images,magic names 'magic': set 1, or some of images, renderer, repair"),
        ({"DOOR_NAMES": (HAS, LOST)}, "vLLM 0.32.1 has no vllm.Engine.stop (stopping)"),
        ({"NAMES": (LOST,)}, "vLLM 0.32.1 has no vllm.Engine.stop (stopping)"),
        ({"installed_version": lambda: "0.33.0"}, "vLLM 0.33.0 is installed, and it was tested with 0.31 and 0.32"),
        ({"installed_version": lambda: ""}, "vLLM of an unknown version is installed"),
        ({"SourceTree": SimpleNamespace(installed=lambda _: None)}, "vLLM 0.32.1 has no vllm.Engine.run(prompt)"),
        ({"missing_names": None}, "TypeError: 'NoneType' object is not callable"),
    ],
    ids=["unknown word", "lost name", "lost name of semel's", "other release", "no release", "no source", "a bug"],
)
def test_a_door_that_stays_shut_says_why_in_one_line_and_installs_nothing(
    lines: list[str],
    fakes: dict[str, Level],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    says: str,
) -> None:
    setting = change.pop("setting", "1")
    for name, value in change.items():
        monkeypatch.setattr(levels, name, value)
    for _ in range(2):  # in the server's first process and in one that it starts
        open_door(setting)
    assert len(lines) == 1
    assert lines[0].startswith(f"semel: the door stays shut, and vLLM runs as it is: {says}")
    assert not any(fake.installed for fake in fakes.values())


@pytest.mark.parametrize("setting", ["", " ", "0"])
def test_without_semel_nothing_is_opened_and_a_door_that_fails_says_so(
    setting: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL", setting)
    monkeypatch.setattr(levels, "open_door", None)
    register()
    assert (lines, capsys.readouterr().err) == ([], "")
    monkeypatch.setenv("SEMEL", "1")
    register()  # the control
    said = capsys.readouterr().err
    assert said.startswith("semel: the door stays shut, and vLLM runs as it is: TypeError: ")
    assert said.count("\n") == 1
    monkeypatch.setitem(sys.modules, "semel.vllm_plugin.levels", None)  # as where something that it imports is missing
    register()
    assert "ModuleNotFoundError" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    register()


PROGRAM = """
import logging, os, sys
model = sys.argv[1]
from prometheus_client import REGISTRY
from vllm import plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

def start(title):
    plugins.plugins_loaded = False
    print(f"== {title}", flush=True)
    EngineArgs(model=model)
    name = MEDIA_CONNECTOR_REGISTRY.name2class["http"].__module__
    metrics = sum("semel" in metric.name for metric in REGISTRY.collect())
    print("runs with", name, metrics, "semel.vllm_plugin.levels" in sys.modules, flush=True)

start("inert")
os.environ["SEMEL"] = "images"
from semel.engine.vllm.compat import door_names
from semel.engine.vllm.compat.names import Name
whole, lost = door_names.DOOR_NAMES, Name("vllm.engine.arg_utils", "EngineArgs.made_up", (), "the test")
door_names.DOOR_NAMES = (lost, *whole)
start("a lost name")
from semel.vllm_plugin import levels
levels.DOOR_NAMES = whole
del os.environ[levels.VERDICT]
start("on")
start("again, as in a process that it starts")
del os.environ[levels.VERDICT]
os.environ["SEMEL"] = "imagse"
start("an unknown word")
"""


@pytest.mark.engine
def test_a_process_of_vllm_is_as_it_was_without_semel_and_runs_whatever_is_wrong_with_the_door(tiny: Any) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("SEMEL", VERDICT)}
    command = [sys.executable, "-c", PROGRAM, str(tiny("qwen2-vl"))]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, stdout=pipe, stderr=both, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stdout
    said = {title: text.splitlines() for title, _, text in (part.partition("\n") for part in done.stdout.split("== "))}
    plain, ours = "runs with vllm.multimodal.media.connector 0", "runs with semel.vllm_plugin.images 0"
    assert said["inert"] == [f"{plain} False"]
    line, runs = said["a lost name"]
    assert "has no vllm.engine.arg_utils.EngineArgs.made_up (the test)" in line
    assert runs == f"{plain} True"
    line, runs = said["on"]
    assert line.startswith("semel: images are decoded when needed")
    assert runs == f"{ours} True"
    assert said["again, as in a process that it starts"] == [f"{ours} True"]
    assert "names 'imagse'" in said["an unknown word"][0]
    assert len(said["an unknown word"]) == 2
