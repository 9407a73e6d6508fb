"""The layers, the rooms of the frontend, the names, the public surface, and what a process may import."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tools.layers import LAYERS, PAGES, ROOT, SOURCE, imports_of, layer_of, modules, nodes_of, tree_of, with_table

MAX_ROOMS = 10
WORDS = re.compile(r"(asked|told|given|shown|taken|held)$", re.IGNORECASE)
"""Everyday words that named technical things: the field has a noun for each of them."""

EXCEPTIONS: Mapping[str, str] = {}
"""Identifiers that end in one of the words all the same, each with its reason."""

Graph = Mapping[str, Iterable[str]]


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """All that is parsed goes at the end, and is not walked by collections meanwhile: half a million objects."""
    gc.disable()
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


def import_graph() -> dict[str, frozenset[str]]:
    return {module: imports_of(module) & (modules().keys() - {module}) for module in modules()}


def imports_upwards(graph: Graph) -> list[str]:
    heights = {name: height for height, name in enumerate(LAYERS)}
    return [
        f"{module} imports {name}"
        for module, names in graph.items()
        for name in names
        if module != "semel" and heights[layer_of(name)] > heights[layer_of(module)]
    ]


def circle_in(graph: Graph) -> list[str]:
    """A circle, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def rooms(graph: Graph, package: str) -> dict[str, set[str]]:
    """The direct children of a package, and what each imports of its siblings."""
    prefix = f"{package}."
    found: dict[str, set[str]] = {}
    for module, names in graph.items():
        if module.startswith(prefix):
            room = module.removeprefix(prefix).partition(".")[0]
            siblings = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
            found.setdefault(room, set()).update(siblings - {room})
    return found


def identifiers_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), other or "")


def everyday_words_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {name for name in identifiers_in(nodes) if WORDS.search(name)} - EXCEPTIONS.keys()


def surface_faults(module: str, tree: ast.Module) -> list[str]:
    """What is wrong with `__all__`: its order, names that the module does not have, functions and classes left out."""
    listed, own, others = list[str](), set[str](), set[str]()
    for node in _statements(tree.body):
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                listed = ast.literal_eval(value)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                others |= {alias.asname or alias.name for alias in names}
            case ast.Assign(targets=targets):
                others |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                others.add(name)
    public = (
        {name for name in own if not name.startswith("_")}
        if layer_of(module) != "cli" and not module.startswith("semel.lab.cli.")
        else set()
    )
    is_sorted = listed == sorted(listed, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    return [
        *(() if is_sorted else ["not sorted"]),
        *(f"not there: {name}" for name in sorted({*listed} - own - others)),
        *(f"not listed: {name}" for name in sorted(public - {*listed})),
    ]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also under its conditions."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements([one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)])
        else:
            yield node


def test_imports_point_down_and_name_modules() -> None:
    graph = import_graph()
    assert not imports_upwards(graph)
    assert not [module for module, names in graph.items() if "semel" in names]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle_in(import_graph())


ROOMS = ("semel.frontend", "semel.frontend.api", "semel.engine.vllm", "semel.render", "semel.lab")


def test_packages_have_few_rooms_and_none_of_them_import_each_other() -> None:
    graph = import_graph()
    assert len(rooms(graph, "semel.frontend")) <= MAX_ROOMS
    assert not {package: circle for package in ROOMS if (circle := circle_in(rooms(graph, package)))}


def test_mutant_an_import_upwards_a_circle_and_a_room_that_imports_back_are_found() -> None:
    graph = import_graph()
    graph["semel.core.digest"] |= {"semel.frontend.app"}
    assert imports_upwards(graph) == ["semel.core.digest imports semel.frontend.app"]
    assert "semel.core.digest" in circle_in(graph)
    graph = import_graph()
    graph["semel.frontend.api.shared.usage"] |= {"semel.frontend.http.body"}
    assert {"api", "http"} <= set(circle_in(rooms(graph, "semel.frontend")))
    graph["semel.engine.vllm.compat.names"] |= {"semel.engine.vllm.plugins.scheduler"}
    assert {"compat", "plugins"} <= set(circle_in(rooms(graph, "semel.engine.vllm")))


def test_the_pages_show_these_layers() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert with_table(text) == text, f"{page} shows other layers: run `python -m tools.layers`"


def test_no_identifier_is_an_everyday_word_for_a_technical_thing() -> None:
    found = {module: words for module in modules() if (words := everyday_words_in(nodes_of(module)))}
    assert not found


def test_mutant_an_everyday_word_is_found_wherever_a_name_can_stand() -> None:
    source = "def f(asked, *, b): import a.held as c; d.given = g(told=1); shown = 1\nclass Taken: ..."
    assert everyday_words_in(ast.walk(ast.parse(source))) == {"asked", "held", "given", "told", "shown", "Taken"}


def test_a_worker_imports_nothing_of_a_frontend() -> None:
    graph = import_graph()
    of_worker = {module: names for module, names in graph.items() if layer_of(module) == "worker"}
    assert not [module for module, names in of_worker.items() if any(layer_of(name) == "frontend" for name in names)]


def test_only_the_engine_and_what_compares_with_it_know_vllm() -> None:
    others = [module for module in modules() if layer_of(module) not in {"engine", "vllm_plugin", "lab"}]
    assert not [module for module in others if any(name.partition(".")[0] == "vllm" for name in imports_of(module))]


def test_the_public_surface_is_sorted_and_complete() -> None:
    found = {module: faults for module in modules() if (faults := surface_faults(module, tree_of(module)))}
    assert not found


def test_mutant_a_surface_that_is_not_sorted_or_not_complete_is_found() -> None:
    source = "__all__ = ['b', 'A', 'gone']\ndef b(): ...\nclass A: ...\ndef c(): ...\ndef _d(): ..."
    assert surface_faults("semel.core.x", ast.parse(source)) == ["not sorted", "not there: gone", "not listed: c"]


SERVING = (
    "semel",
    "semel.render",
    "semel.processing.families",
    "semel.processing.pool.pool",
    "semel.frontend.app",
    "semel.fleet.worker",
    "semel.cli",
    "semel.lab.testing.models",
)


def heavy_after(*imported: str) -> list[str]:
    """What a process has that imports these, one after the other: each heavy package, and who brought it."""
    program = (
        "import importlib, sys\nseen = set()\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        "    new = {'torch', 'torchvision', 'transformers', 'vllm'} & {*sys.modules} - seen\n"
        "    seen |= new\n    for one in sorted(new): print(name, 'brings', one)"
    )
    command = [sys.executable, "-c", program, *imported]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def test_what_a_serving_process_imports_brings_neither_torch_nor_transformers_nor_vllm() -> None:
    assert heavy_after(*SERVING) == []


def test_every_package_of_the_source_is_a_layer() -> None:
    top = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert top - {"__init__"} == LAYERS.keys()
