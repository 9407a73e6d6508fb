"""Stores for tests: every kind that one contract is for, and a sealed store over any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

from hypothesis.stateful import RuleBasedStateMachine

from semel.core import Digest, Key
from semel.core.embedding import Form
from semel.embeddings.nodes import Node, Nodes
from semel.embeddings.protocol import BlobStore
from semel.embeddings.sealed import SealedStore
from semel.lab.testing.embedding_store import MemoryBlobs
from tests.embeddings.certificates import Authority
from tests.embeddings.redis import running_redis

KEY: Final = Key(bytes(range(32)))
IDENTITY: Final = b"an encoder"
KINDS: Final = ("memory", "tcp", "unix", "password", "tls")
TTL_S: Final = 3_600

Script = tuple[tuple[Any, ...], ...]
"""Names of a machine's rules, each with its values."""


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "little"))


def content(nbytes: int, seed: int = 1) -> bytearray:
    """Bytes in which no two chunks are alike."""
    return bytearray(Random(seed).randbytes(nbytes))


def pieces(data: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    """The bytes in buffers of these sizes, and the rest in one more."""
    view = memoryview(data)
    found = []
    for size in sizes:
        found.append(view[:size])
        view = view[size:]
    return [*found, view] if view else found


def sealed(*blobs: BlobStore, key: Key = KEY, identity: bytes = IDENTITY) -> SealedStore:
    nodes = Nodes([Node(f"node-{index}", one) for index, one in enumerate(blobs)])
    return SealedStore(key, identity, nodes, TTL_S)


class Staging:
    """Memory for what is fetched, as much of it as anybody wants."""

    def __init__(self, room: int = 1 << 30, block: int = 300_000) -> None:
        self.room = room
        self.block = block
        self.data: dict[Digest, bytearray] = {}

    def __call__(self, digest: Digest, form: Form) -> list[memoryview] | None:
        nbytes = form[0] * form[1] * {"torch.float32": 4, "torch.bfloat16": 2}[form[2]]
        if nbytes > self.room:
            return None
        self.room -= nbytes
        self.data[digest] = bytearray(nbytes)
        return pieces(self.data[digest], [self.block] * ((nbytes - 1) // self.block))


@contextmanager
def open_store(kind: str, home: Path) -> Iterator[tuple[BlobStore, Callable[[], BlobStore]]]:
    """A store of a kind, and how another process would open the same one."""
    if kind == "memory":
        memory = MemoryBlobs()
        yield memory, lambda: memory
        return
    with ExitStack() as stack:
        redis = stack.enter_context(
            running_redis(
                home,
                is_unix=kind == "unix",
                password="a password" if kind in ("password", "tls") else None,
                authority=Authority.create(home / "tls") if kind == "tls" else None,
            )
        )

        def another() -> BlobStore:
            store = redis.store()
            stack.callback(store.close)
            return store

        yield another(), another


def play(machine: RuleBasedStateMachine, script: Script) -> None:
    for name, *values in script:
        getattr(machine, name)(*values)
