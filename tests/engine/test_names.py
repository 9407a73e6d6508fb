"""The table of vLLM's names: all that semel uses is in it, and what is missing is told before an engine loads."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import semel.engine.vllm
from semel.core import Prompt, Submission, Timeline
from semel.engine.vllm.compat import versions
from semel.engine.vllm.compat.door_names import DOOR_NAMES
from semel.engine.vllm.compat.names import NAMES, Name
from semel.engine.vllm.compat.source import SourceTree
from semel.engine.vllm.compat.versions import check_vllm, missing_names
from semel.errors import ConfigError
from semel.fleet.stream import BufferedAnswer
from tools.engine.versions import BENCH_NAMES, code_digest

FOLDER = Path(semel.engine.vllm.__file__).parent
PRIVATE = re.compile(r"_[a-z]\w+")
TREE = {
    "shop/__init__.py": "from .till import Till as Desk\n",
    "shop/till.py": '''
from shop.base import Base
try:
    LIMIT = 3
except ImportError:
    LIMIT = 4
class Till(Base):
    """Takes money."""
    price: int
    def take(self, coin, *, change=True):
        # a comment
        self.taken = coin
    def any(self, **kwargs): ...
''',
    "shop/base.py": "class Base:\n    owner: str\n    def close(self): ...\n",
}


def tree(**changes: str) -> SourceTree:
    return SourceTree("shop", {**TREE, **{name.replace("_", "/") + ".py": text for name, text in changes.items()}}.get)


@pytest.mark.parametrize(
    ("module", "path", "parameters"),
    [
        ("shop", "Desk", ("owner", "price")),
        ("shop", "Desk.take", ("coin", "change")),
        ("shop", "Desk.close", ()),
        ("shop", "Desk.taken", None),
        ("shop", "Desk.owner", None),
        ("shop.till", "LIMIT", None),
        ("shop", "till", None),
    ],
)
def test_a_name_is_found_where_it_is_defined(module: str, path: str, parameters: tuple[str, ...] | None) -> None:
    found = tree().find(module, path)
    assert found is not None
    assert found.parameters == parameters


@pytest.mark.parametrize("path", ["Desk.give", "Shelf", "LIMIT.take", "Desk.coin"])
def test_what_is_not_defined_is_not_found(path: str) -> None:
    assert tree().find("shop", path) is None


def test_a_digest_changes_with_code_and_not_with_comments() -> None:
    here = tree().find("shop", "Desk")
    rewritten = TREE["shop/till.py"].replace("# a comment", "# another").replace("Takes money", "Takes cash")
    changed = TREE["shop/till.py"].replace("change=True", "change=False")
    same, other = (tree(shop_till=text).find("shop", "Desk") for text in (rewritten, changed))
    assert here is not None
    assert same is not None
    assert other is not None
    assert code_digest(here) == code_digest(same) != code_digest(other)


@pytest.mark.parametrize(
    ("path", "parameters", "is_missing"),
    [
        ("Till.take", ("coin", "change"), False),
        ("Till.take", ("coin", "tip"), True),
        ("Till.any", ("whatever",), False),
        ("Till.give", (), True),
    ],
)
def test_a_name_is_missing_also_if_it_cannot_be_called_so(
    path: str, parameters: tuple[str, ...], is_missing: bool
) -> None:
    name = Name("shop.till", path, parameters, "the test")
    assert missing_names(tree(), "0.32", [name]) == [name] * is_missing


def test_a_release_need_not_have_what_came_later_or_went_before() -> None:
    later = Name("shop.till", "later", (), "the test", since="0.32")
    gone = Name("shop.till", "gone", (), "the test", until="0.31")
    assert missing_names(tree(), "0.31", [later, gone]) == [gone]
    assert missing_names(tree(), "0.32", [later, gone]) == [later]
    assert missing_names(tree(), "0.100", [later, gone]) == [later]


def test_another_release_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.30.2")
    with pytest.raises(ConfigError, match=r"vLLM 0\.30\.2 is installed, and semel runs with 0\.31 and 0\.32: install"):
        check_vllm([])
    monkeypatch.setattr(versions, "installed_version", lambda: "0.32.9")  # the control
    check_vllm([])


def test_a_missing_vllm_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "")
    with pytest.raises(ConfigError, match="vLLM is not installed here: install vllm"):
        check_vllm([])


@pytest.mark.engine
def test_the_installed_vllm_has_all_names() -> None:
    check_vllm()


@pytest.mark.engine
def test_a_made_up_name_is_told_within_10_s_and_nothing_is_loaded() -> None:
    """In a process of its own, as a worker's: with the control that nothing is wrong without the name."""
    program = """
import sys
from semel.core import Prompt, Submission, Timeline
from semel.engine.vllm.compat import versions
from semel.engine.vllm.compat.names import NAMES, Name
versions.check_vllm(NAMES)
extra = Name("vllm.v1.core.sched.scheduler", "Scheduler._made_up", (), "the test")
try:
    versions.check_vllm([*NAMES, extra])
except versions.ConfigError as error:
    print(error)
print("vllm" in sys.modules, "torch" in sys.modules)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert "Missing:\n  vllm.v1.core.sched.scheduler.Scheduler._made_up: the test\n" in result.stdout
    assert result.stdout.endswith("False False\n")
    assert took_s < 10, f"{took_s:.1f} s of CPU"


def test_all_that_semel_uses_of_vllm_is_in_the_table() -> None:
    assert unlisted(NAMES) == []
    assert unlisted([*NAMES, *DOOR_NAMES], FOLDER.parents[1] / "vllm_plugin") == []


def test_all_that_semel_imports_of_vllm_elsewhere_is_in_one_of_the_tables() -> None:
    assert len(elsewhere(NAMES)) >= len(BENCH_NAMES)  # the control
    assert elsewhere([*NAMES, *DOOR_NAMES, *BENCH_NAMES]) == []


def test_the_sampling_parameters_that_semel_adds_by_itself_are_in_the_table() -> None:
    (name,) = (name for name in NAMES if name.path == "SamplingParams.from_optional")
    whole = BufferedAnswer.in_strides(Submission("r", Prompt((1,), Timeline.decoder([]), ()), {}))
    assert whole.sampling.keys() == {"stream_interval"}
    assert whole.sampling.keys() <= {*name.parameters}


def test_a_name_that_is_taken_out_of_the_table_is_found() -> None:
    """The control: each kind of use is seen by the search."""
    for path in (
        "AsyncLLM",  # an import
        "CPUWorker",  # a name in a string
        "BaseMultiModalProcessor._apply_hf_processor_main",  # an attribute of another's object
        "Scheduler._reject_on_encoder_cache_embed_mismatch",  # an inherited attribute
        "BaseMultiModalProcessor._postprocess_prompt",  # a string
        "ChatCompletionRequest._grammar_from_parser",
    ):
        assert unlisted([name for name in NAMES if name.path != path]), path


class Uses(NamedTuple):
    """What a file uses, and what it defines."""

    imports: frozenset[tuple[str, str]]
    private: frozenset[str]
    own: frozenset[str]


@cache
def uses_of(path: Path) -> Uses:
    parsed = ast.parse(path.read_text())
    return Uses(frozenset(_imports(parsed)), frozenset(_private_uses(parsed)), frozenset(_own_names(parsed)))


def unlisted(names: Sequence[Name], folder: Path = FOLDER) -> list[str]:
    """What a folder of semel uses of vLLM and a table does not have."""
    listed = {(name.module, name.path) for name in names}
    attributes = {name.path.rpartition(".")[2] for name in names}
    files = {
        str(path.relative_to(folder)): uses_of(path)
        for path in sorted(folder.rglob("*.py"))
        if not path.name.endswith("names.py")
    }
    own = attributes.union(*(uses.own for uses in files.values()))
    found = []
    for file, uses in files.items():
        found += [f"{file}: {module}.{name}" for module, name in uses.imports if (module, name) not in listed]
        found += [f"{file}: {name}" for name in uses.private if name not in own]
    return found


def elsewhere(names: Sequence[Name]) -> list[str]:
    """What the rest of semel imports of vLLM and a table does not have."""
    listed = {(name.module, name.path) for name in names}
    files = [path for path in sorted(FOLDER.parents[1].rglob("*.py")) if FOLDER not in path.parents]
    used = {(path.name, pair) for path in files if "vllm" in path.read_text() for pair in uses_of(path).imports}
    return sorted(f"{file}: {'.'.join(pair)}" for file, pair in used if pair not in listed)


def _imports(parsed: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "vllm")
        if isinstance(node, ast.Constant) and re.fullmatch(r"vllm\.[\w.]+\w", str(node.value)):
            module, _, name = str(node.value).rpartition(".")
            yield module, name


def _private_uses(parsed: ast.Module) -> Iterator[str]:
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and ast.unparse(node) != "os._exit":
            yield node.attr
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            yield node.value


def _own_names(parsed: ast.Module) -> Iterator[str]:
    """What semel's own classes and modules define; but for what they override of vLLM's, which is used all the same."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
