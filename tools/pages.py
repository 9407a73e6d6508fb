"""Pages by their paths, and the code in them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

Pages = Mapping[str, str]

ROOT: Final = Path(__file__).resolve().parents[1]
CODE: Final = re.compile(r"^[ >]*```.*?^[ >]*```[ ]*$|``[^\n]+?``|`[^`\n]+(?:\n[^`\n]+)?`", re.DOTALL | re.MULTILINE)
BLOCK: Final = re.compile(r"^([ >]*)```(\w*)[^\n]*\n(.*?)^[ >]*```[ ]*$", re.DOTALL | re.MULTILINE)
LINK: Final = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def read_pages(*others: str) -> dict[str, str]:
    """README, the pages under docs/ and the `others`, which may be patterns, by path."""
    paths = [path for pattern in ("README.md", "docs/**/*.md", *others) for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if path.is_file()}


@cache
def blank(text: str) -> str:
    """The text with its code replaced by as many spaces."""
    return CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def code_lines(text: str) -> Iterator[str]:
    """The logical lines of fenced blocks, and the code spans."""
    for code in CODE.findall(text):
        if code.lstrip(" >").startswith("```"):
            yield from re.sub(r"\\\n\s*", " ", code.partition("\n")[2].rpartition("\n")[0]).splitlines()
        else:
            yield " ".join(code.strip("`").split())


def vllm_folder() -> Path:
    """The source of the vLLM that is installed, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is not installed: scripts/install"
    return Path(spec.submodule_search_locations[0])  # type: ignore[index]
