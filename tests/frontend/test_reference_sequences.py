"""References through random lives of a frontend: uploads, chats, deletions, expiry, other tenants, faults, restarts.

The model and the steps are in `references`. The same sequences find each wrong implementation of `MUTANTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

from semel.core import Digest, Tenant
from semel.render import ChatRenderer
from semel.render.media.names import MediaNames, name_key
from semel.store import store as store_module
from semel.store.index import FileIndex, newest
from semel.store.names import file_id, owner_name
from semel.store.store import MediaStore
from semel.store.upload import Payer
from tests.effort import examples
from tests.frontend.references import (
    HUGE,
    TENANTS,
    TEXT,
    Breaking,
    Chat,
    Delete,
    Fault,
    Forget,
    List,
    Look,
    Part,
    Restart,
    Step,
    Sweep,
    Upload,
    Wait,
    World,
)
from tests.render.conftest import folder, parts_renderer
from tests.store.stores import KEY

__all__ = ["folder", "parts_renderer"]

SEQUENCES = examples(100)
"""Sixty take a second. All ten thousand are tried every night."""


def drawn_life(seed: int) -> list[Step]:
    """A random sequence. It is about few contents, so that they meet again."""
    draw = Random(seed)
    images, names = draw.sample(range(TEXT), draw.randint(1, 5)), ["one", "two"][: draw.randint(1, 2)]
    files = [*images * 3, TEXT, HUGE]

    def whose(tenant: Tenant) -> str:
        return tenant.name if draw.random() < 0.9 else draw.choice(TENANTS).name

    def part(tenant: Tenant) -> Part:
        form: Any = draw.choice(["inline", "inline", "inline", "file", "image_url", "alone", "alone"])
        name = draw.choice(names) if form == "alone" or draw.random() < 0.6 else None
        image = draw.choice(images) if form == "inline" or draw.random() < 0.95 else TEXT
        return Part(form, image, whose(tenant), name)

    def chat(tenant: Tenant) -> Chat:
        parts = tuple(part(tenant) for _ in range(draw.choice([1, 1, 1, 2, 3])))
        return Chat(tenant, parts, returns_ids=draw.random() < 0.3)

    def upload(tenant: Tenant) -> Upload:
        return Upload(tenant, draw.choice(files), draw.choice([None, None, 30]))

    def delete(tenant: Tenant) -> Delete:
        return Delete(tenant, draw.choice(files), whose(tenant))

    kinds: list[tuple[int, Callable[[Tenant], Step]]] = [
        (40, chat),
        (20, upload),
        (4, delete),
        (6, lambda tenant: Look(tenant, draw.choice(files), whose(tenant), reads=draw.random() < 0.5)),
        (3, List),
        (3, lambda tenant: Breaking(upload(tenant), draw.randrange(6))),
        (1, lambda tenant: Breaking(delete(tenant), draw.randrange(4))),
        (5, lambda _: Wait(draw.choice([1.0, 30.0, 70.0]))),
        (3, lambda _: Sweep()),
        (2, lambda _: Restart()),
        (6, lambda _: Fault(draw.choice(["", "", "gone", "full"]))),
        (5, lambda _: Forget(draw.choice(images))),
    ]
    chosen = draw.choices([make for _, make in kinds], [weight for weight, _ in kinds], k=draw.randint(5, 60))
    return [make(draw.choice(TENANTS)) for make in chosen]


async def is_wrong(renderer: ChatRenderer, steps: list[Step]) -> bool:
    try:
        await World(renderer).live(steps)
    except (AssertionError, LookupError):
        return True
    return False


async def shortened(renderer: ChatRenderer, steps: list[Step]) -> list[Step]:
    """What is left of a sequence that goes wrong, if no step of it can be left out."""
    for index in reversed(range(len(steps))):
        fewer = steps[:index] + steps[index + 1 :]
        if await is_wrong(renderer, fewer):
            steps = fewer
    return steps


async def check(renderer: ChatRenderer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        steps = drawn_life(seed)
        try:
            await World(renderer).live(steps)
        except (AssertionError, LookupError) as error:
            error.add_note(f"seed {seed}; shortened: {await shortened(renderer, steps)}")
            raise


async def test_in_any_sequence_a_chat_is_answered_with_what_was_named(parts_renderer: ChatRenderer) -> None:
    await check(parts_renderer, range(SEQUENCES))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3_600)
async def test_in_ten_thousand_sequences_a_chat_is_answered_with_what_was_named(parts_renderer: ChatRenderer) -> None:
    await check(parts_renderer, range(10_000))


def _names_of_everybody(patch: pytest.MonkeyPatch) -> None:
    memory = MediaNames._memory
    patch.setattr(MediaNames, "_memory", lambda self, _: memory(self, Tenant()))


def _names_without_salt(patch: pytest.MonkeyPatch) -> None:
    bind, content = MediaNames.bind, MediaNames.content
    patch.setattr(MediaNames, "bind", lambda self, tenant, *rest: bind(self, Tenant(tenant.name), *rest))
    patch.setattr(MediaNames, "content", lambda self, tenant, *rest: content(self, Tenant(tenant.name), *rest))


def _last_content_wins(patch: pytest.MonkeyPatch) -> None:
    def bind(self: MediaNames, tenant: Tenant, name: str, content: Digest) -> None:
        self._memory(tenant).names.put(name_key(tenant, name), content)

    patch.setattr(MediaNames, "bind", bind)


def _first_content_wins(patch: pytest.MonkeyPatch) -> None:
    def bind(self: MediaNames, tenant: Tenant, name: str, content: Digest) -> None:
        names = self._memory(tenant).names
        names.put(name_key(tenant, name), names.get(name_key(tenant, name)) or content)

    patch.setattr(MediaNames, "bind", bind)


def _items_of_any_content(patch: pytest.MonkeyPatch) -> None:
    """A tenant's item is taken for another one of its."""
    patch.setattr(
        MediaNames, "digest", lambda self, tenant, _: next(iter(self._memory(tenant).digests._values.values()), None)
    )


def _no_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_module, "newest", lambda files, _: newest(files, -1.0))


def _files_of_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_module, "owner_name", lambda _, key: owner_name("acme", key))


def _index_keeps_what_is_deleted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileIndex, "remove", lambda *_: None)


def _room_for_what_has_expired(patch: pytest.MonkeyPatch) -> None:
    """What has expired takes room until it is swept."""

    async def nothing(*_: object) -> None:
        pass

    patch.setattr(MediaStore, "_make_room", nothing)


def _delete_first(patch: pytest.MonkeyPatch) -> None:
    put = MediaStore.put

    async def mutant(self: MediaStore, tenant: str, upload: Any, *pin: Any) -> Any:
        payer = Payer(owner_name(tenant, KEY))
        await self._try_to_delete(await self._objects_of(payer, file_id(upload.content, tenant, KEY)), payer)
        return await put(self, tenant, upload, *pin)

    patch.setattr(MediaStore, "put", mutant)


MUTANTS = (
    _names_of_everybody,
    _names_without_salt,
    _last_content_wins,
    _first_content_wins,
    _items_of_any_content,
    _no_expiry,
    _files_of_everybody,
    _index_keeps_what_is_deleted,
    pytest.param(_room_for_what_has_expired, marks=(pytest.mark.slow, pytest.mark.nightly)),
    _delete_first,
)


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_such_sequences_find_a_wrong_implementation(
    parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutant(monkeypatch)
    for seed in range(1_000):
        if await is_wrong(parts_renderer, drawn_life(seed)):
            return
    pytest.fail("it was not found")
