"""The tests that a change concerns, for `scripts/quick`: `python -m tools.selection` prints them, one per line.

A changed module brings the tests of its package, `tests/PACKAGE`, and the test files of the modules that import it: of
`semel.cli.fetching` that is `tests/cli/test_fetching.py`. A changed file under `tests` brings itself, or its folder if
it is no test. What is further away is left to `scripts/check`.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["changed_files", "imports_of", "selected_tests"]

ROOT: Final = Path(__file__).parent.parent
_MAIN: Final = "main"


def changed_files(root: Path = ROOT) -> list[str]:
    """Return what differs from where the branch left `main`, committed or not, new files too."""
    base = _git(root, "merge-base", "HEAD", _MAIN) or ["HEAD"]
    return _git(root, "diff", "--name-only", base[0]) + _git(root, "ls-files", "--others", "--exclude-standard")


def selected_tests(changed: Iterable[str], imports: Mapping[str, frozenset[str]], tests: Iterable[str]) -> list[str]:
    """The tests, as paths for pytest: `imports` says what each module imports, `tests` which test files there are."""
    known, found = list(tests), set[str]()
    for path in map(Path, changed):
        if path.parts[:2] == ("src", "semel") and path.suffix == ".py":
            module = _module_of(path)
            importing = [name for name, imported in imports.items() if module in imported]
            found |= {test for test in known if _is_of_package(test, module)}
            found |= {test for name in importing for test in known if _is_of_module(test, name)}
        elif path.parts[:1] == ("tests",) and path.suffix == ".py":
            folder = str(path.parent)
            found |= {str(path)} & set(known) or {test for test in known if str(Path(test).parent) == folder}
    return sorted(found)


def imports_of(source: Path) -> dict[str, frozenset[str]]:
    """Return every module of `semel`, and what it imports of it."""
    return {_module_of(file.relative_to(source.parent)): frozenset(_imported(file)) for file in source.rglob("*.py")}


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    names = parts[parts.index("semel") :]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _is_of_package(test: str, module: str) -> bool:
    """Return whether a test file is in the folder of a module's package, or named after a module outside packages."""
    package = module.split(".")[1:2]
    return test.split("/")[1:2] == package or test == f"tests/test_{'.'.join(package)}.py"


def _is_of_module(test: str, module: str) -> bool:
    *packages, name = module.split(".")[1:] or [""]
    return test.endswith(f"/test_{name}.py") and test.split("/")[1:-1][:1] == packages[:1]


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def main() -> None:
    tests = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]
    print(*selected_tests(changed_files(), imports_of(ROOT / "src" / "semel"), tests), sep="\n")


if __name__ == "__main__":
    main()
