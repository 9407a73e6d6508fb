"""S10: nothing that comes from outside is unpickled or evaluated, and no length is believed before it is checked.

CVE-2025-32444, CVE-2025-62164, CVE-2026-3059. Random and mutated frames are in `tests/wire` and `tests/fuzz`.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import semel
from semel.errors import InvalidRequest, ProtocolError
from semel.interchange.safetensors import read
from semel.processing.pool.pipe import decode_answer, decode_order, read_header
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, decode
from semel.wire.limits import Limits
from tests.operations import peak_bytes

SOURCE = Path(semel.__file__).parent
MODULES = {"cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
CALLS = {"__import__", "compile", "eval", "exec"}
METHODS = {"numpy.load", "np.load", "pandas.read_pickle", "torch.load", "yaml.load", "yaml.unsafe_load"}
MIB = 1024**2


def findings(source: str) -> Iterator[str]:
    """Whatever in a module could make objects of foreign bytes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield name
            case ast.Call(func=ast.Attribute() as called) if ast.unparse(called) in METHODS:
                yield ast.unparse(called)


@pytest.mark.parametrize(
    "naive",
    [
        "import pickle",
        "from pickle import loads",
        "import dill.source",
        "import torch\nx = torch.load(path, weights_only=True)",
        "y = yaml.load(text)",
        "eval(text)",
        "def f():\n    exec(text)",
        "__import__(name)",
    ],
)
def test_the_scan_finds_what_it_looks_for(naive: str) -> None:
    assert list(findings(naive))


def test_no_module_can_unpickle_or_evaluate() -> None:
    words = re.compile("|".join((*MODULES, *CALLS, *(name.rpartition(".")[2] for name in METHODS))))
    sources = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    suspects = {path: source for path, source in sources.items() if words.search(source)}  # to parse all takes seconds
    assert len(sources) > len(suspects) > 10
    assert not [(path, found) for path, source in suspects.items() if (found := [*findings(source)])]


class _Bomb:
    """What a pickle can do to whoever loads it: here it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)


READERS: dict[str, Callable[[bytes], object]] = {
    "frames from a frontend": lambda data: decode([bytes(16) + data], FROM_FRONTEND, Limits()),
    "frames from a worker": lambda data: decode([bytes(16) + data], FROM_WORKER, Limits()),
    "orders of a pool": lambda data: decode_order(data),
    "answers of a process": lambda data: decode_answer(data, payload_bytes=0),
    "injected files": lambda data: read(memoryview(data)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pickle_is_refused_by_every_reader_and_does_nothing(reader: str, tmp_path: Path) -> None:
    naive, ours = tmp_path / "naive", tmp_path / "ours"
    pickle.loads(pickle.dumps(_Bomb(naive)))
    assert naive.exists()
    bomb = pickle.dumps(_Bomb(ours))
    for data in (bomb, len(bomb).to_bytes(8, "little") + bomb):
        with pytest.raises((InvalidRequest, ProtocolError)):
            READERS[reader](data)
    assert not ours.exists()


def test_a_length_that_is_only_announced_makes_nobody_allocate_it() -> None:
    header = struct.pack("<IQ", 16, 64 * MIB)
    naive = peak_bytes(lambda: bytearray(struct.unpack("<IQ", header)[1]))
    assert naive >= 64 * MIB
    assert peak_bytes(lambda: read_header(header, max_payload_bytes=MIB), ProtocolError) < MIB
    with pytest.raises(ProtocolError, match="the limits are"):
        read_header(header, max_payload_bytes=MIB)
    file = memoryview((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidRequest, match="announces a header"):
        read(file)


def safetensors_file(header: dict[str, object], data: bytes) -> memoryview:
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + data)


def test_tensors_that_lie_over_each_other_are_refused_and_not_copied_out_of_one_megabyte() -> None:
    """The naive reader trusts offsets: sixty-four tensors over the same megabyte are sixty-four megabytes."""
    heads = {f"{number:064x}/a": {"dtype": "U8", "shape": [MIB], "data_offsets": [0, MIB]} for number in range(64)}
    file = safetensors_file(dict(heads), bytes(MIB))

    def naive() -> list[bytes]:
        begin = 8 + int.from_bytes(file[:8], "little")
        header = json.loads(bytes(file[8:begin]))
        return [bytes(file[begin:][slice(*head["data_offsets"])]) for head in header.values()]

    assert peak_bytes(naive) >= 64 * MIB
    assert peak_bytes(lambda: read(file), InvalidRequest) < MIB
    with pytest.raises(InvalidRequest, match="no gap, no overlap"):
        read(file)
