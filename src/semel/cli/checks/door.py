"""`semel doctor --vllm`: which levels of the door are on in a plain vLLM with this environment, and why others are not.

Each level is installed into this process, as into one of vLLM's, and no engine starts. A level that depends on vLLM's
flags or on the model may still be off for a server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from semel.cli.checks.finding import Finding
from semel.engine.vllm.compat.versions import TESTED, installed_version
from semel.vllm_plugin.levels import LEVELS, LevelOff, parse_levels, shut_reason

__all__ = ["check_door"]

_POOL: Final = ("numpy", "pillow", "torch", "transformers")
"""The packages that a preprocessing process imports. Clips and videos reach it decoded."""


def check_door(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what vLLM would find: the plug-in, its levels, and what these need."""
    if not (installed := installed_version()):
        yield Finding("vLLM", "problem", "not installed", "run this in the environment of vLLM")
        return
    setting = environment.get("SEMEL", "").strip()
    is_set = setting not in ("", "0")
    setting = setting if is_set else "1"
    if reason := shut_reason(setting):
        yield Finding("vLLM", "problem", reason, f"the door stays shut; tested with vLLM {' and '.join(TESTED)}")
        return
    yield Finding("vLLM", "ok", installed)
    yield _plugin(environment.get("VLLM_PLUGINS"))
    if is_set:
        yield Finding("SEMEL", "ok", setting)
    else:
        yield Finding("SEMEL", "warning", "not set, so vLLM runs without semel", "set SEMEL=1 for what follows")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the findings are the output
    levels = [_level(level) for level in parse_levels(setting)]
    yield from levels
    on = {found.what for found in levels if found.verdict == "ok"}
    if "renderer" in on:
        yield _decoders(has_images="images" in on)
        yield from (_package(name) for name in _POOL)


def _plugin(allowed: str | None) -> Finding:
    """Check that vLLM calls semel at all."""
    if not entry_points(name="semel", value="semel.vllm_plugin:register"):
        return Finding("plug-in", "problem", "not among vLLM's plug-ins", "pip install semel again")
    if allowed is not None and "semel" not in allowed.split(","):
        remedy = f"VLLM_PLUGINS={','.join(filter(None, (*allowed.split(','), 'semel')))}"
        return Finding("plug-in", "problem", f"VLLM_PLUGINS={allowed} leaves semel out", remedy)
    return Finding("plug-in", "ok", "vLLM calls it")


def _level(level: str) -> Finding:
    try:
        return Finding(level, "ok", import_module(LEVELS[level]).install())
    except LevelOff as reason:
        return Finding(level, "warning", f"off: {reason}")
    except Exception as error:  # noqa: BLE001 (vLLM would run without it)
        return Finding(level, "problem", f"off: {type(error).__name__}: {error}", "this is a fault of semel: report it")


def _decoders(*, has_images: bool) -> Finding:
    """Say where media are decoded: the renderer has files opened in its processes only if nobody has opened them."""
    if has_images:
        where = (
            "of images in sandboxed processes, if they make the model's items; of clips and videos in the API server"
        )
        return Finding("decoders", "ok", where)
    return Finding("decoders", "warning", "all in the API server", "with the level images, those of images are not")


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "warning", "not installed, and preprocessing needs it", f"pip install {name}")
