"""The row of a model in the page of models: compared with bare vLLM, or only known by its class, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from semel.cli.checks.finding import Finding
from semel.errors import ConfigError
from semel.processing.folder import read_config

__all__ = ["check_compatibility"]

_WHAT: Final = "tested"
_REMEDY: Final = "`semel verify MODEL` compares it with bare vLLM on this machine"


def check_compatibility(model: str) -> Iterator[Finding]:
    """Yield what is known of a model in a folder; nothing for a name of the hub, which nothing here reads."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        return
    try:
        config = read_config(folder)
    except ConfigError:
        return
    rows, kind = _rows(), str(config.get("model_type", ""))
    if (row := rows["types"].get(kind)) is not None:
        compared = "not compared" not in row
        yield Finding(_WHAT, "ok" if compared else "warning", f"{kind}: {row}", "" if compared else _REMEDY)
        return
    names = [name for name in config.get("architectures") or () if name in rows["architectures"]]
    known = (
        f"known by its class only ({rows['architectures'][names[0]]})" if names else "in no row of the page of models"
    )
    yield Finding(_WHAT, "warning", f"{kind or 'no model_type'}: {known}", _REMEDY)


@cache
def _rows() -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("models.json").read_text())
    return rows
