"""`semel doctor --vllm`: what it says of an environment, without an engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

import pytest

from semel.cli import doctor
from semel.cli.checks import door
from semel.cli.checks.finding import Finding
from semel.vllm_plugin.levels import LevelOff
from tests.commands import run_main


@pytest.fixture(autouse=True)
def _levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three levels in the place of vLLM's hooks: one that is on, one that cannot be, one with a fault."""

    def on() -> str:
        return "images are decoded when needed"

    def off() -> str:
        raise LevelOff("SEMEL_LISTEN is not set")

    def broken() -> str:
        raise KeyError("hf")

    for name, install in (("images", on), ("worker", off), ("renderer", broken)):
        module = ModuleType(name)
        module.install = install  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"planted.{name}", module)
    planted = {name: f"planted.{name}" for name in ("images", "renderer", "worker")}
    for where in ("semel.vllm_plugin.levels.LEVELS", "semel.cli.checks.door.LEVELS"):
        monkeypatch.setattr(where, planted)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which the check sets where nobody has
    monkeypatch.setattr("semel.vllm_plugin.levels.missing_names", lambda *_: ())
    monkeypatch.setattr("semel.vllm_plugin.levels.installed_version", lambda: "0.32.0")
    monkeypatch.setattr(door, "installed_version", lambda: "0.32.0")


def examine(**environment: str) -> Mapping[str, Finding]:
    return {found.what: found for found in door.check_door(environment)}


def test_each_level_says_what_it_does_or_why_it_is_off() -> None:
    found = examine(SEMEL="1")
    assert found["images"] == Finding("images", "ok", "images are decoded when needed")
    assert found["worker"] == Finding("worker", "warning", "off: SEMEL_LISTEN is not set")
    assert found["renderer"].verdict == "problem"
    assert "KeyError: 'hf'" in found["renderer"].detail
    assert "worker" not in examine(SEMEL="images")


def test_without_semel_it_says_so_and_shows_what_one_variable_would_do() -> None:
    for found in (examine(), examine(SEMEL="0")):
        assert found["SEMEL"].verdict == "warning"
        assert found["images"].verdict == "ok"
    assert examine(SEMEL="1")["SEMEL"].verdict == "ok"


def test_a_word_that_is_no_level_is_named_with_those_that_are() -> None:
    (found,) = examine(SEMEL="images,rendrer").values()
    assert found.verdict == "problem"
    assert "names 'rendrer': set 1, or some of images, renderer" in found.detail


@pytest.mark.parametrize(("allowed", "verdict"), [("lora", "problem"), ("", "problem"), ("lora,semel", "ok")])
def test_a_list_of_plugins_without_semel_is_found(allowed: str, verdict: str) -> None:
    found = examine(SEMEL="1", VLLM_PLUGINS=allowed)["plug-in"]
    assert found.verdict == verdict
    assert verdict == "ok" or found.remedy.endswith("semel")


def test_a_package_that_the_pool_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_POOL", ("pillow", "no-such-package"))
    assert "pillow" not in examine(SEMEL="1")  # its renderer is off: there is no pool
    monkeypatch.setattr(
        sys.modules["planted.renderer"], "install", lambda: "items are preprocessed in 2 sandboxed processes"
    )
    found = examine(SEMEL="1")
    assert (found["pillow"].verdict, found["no-such-package"].verdict) == ("ok", "warning")


def test_image_decoders_are_said_to_be_in_the_sandbox_only_with_images_and_renderer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "decoders" not in examine(SEMEL="1")
    monkeypatch.setattr(
        sys.modules["planted.renderer"], "install", lambda: "items are preprocessed in 2 sandboxed processes"
    )
    both, alone = examine(SEMEL="images,renderer")["decoders"], examine(SEMEL="renderer")["decoders"]
    assert (both.verdict, "clips and videos in the API server" in both.detail) == ("ok", True)
    assert (alone.verdict, alone.detail) == ("warning", "all in the API server")


def test_a_vllm_that_the_door_does_not_know_ends_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.vllm_plugin.levels.installed_version", lambda: "0.40.0")
    (found,) = door.check_door({})
    assert (found.verdict, "vLLM 0.40.0 is installed" in found.detail) == ("problem", True)
    monkeypatch.setattr(door, "installed_version", lambda: "")
    assert [one.remedy for one in door.check_door({})] == ["run this in the environment of vLLM"]


def test_the_command_prints_the_findings_and_fails_for_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMEL", "images")
    code, said = run_main("doctor", "--vllm")
    assert (code, "images: images are decoded when needed" in said, "sandbox" in said) == (0, True, True)
    monkeypatch.setenv("SEMEL", "renderer")
    assert run_main("doctor", "--vllm")[0] == 1
    monkeypatch.setattr(doctor, "check_door", lambda: iter([Finding("vLLM", "ok", "0.32.0")]))
    assert run_main("doctor", "--vllm")[0] == 0
