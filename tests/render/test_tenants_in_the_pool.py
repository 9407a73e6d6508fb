"""What is inspected and assembled in the pool is its tenant's: it takes turns there as what is processed does (S18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from semel.cache import NoCache
from semel.core import Assembly, Feature, Layout, Media, Modality, Tenant
from semel.render import ChatRenderer
from tests.render.drawn import Drawing, chat, drawn

ACME = Tenant("acme")


class Tenants:
    """A pool that remembers whose work it is."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    async def process(self, media: Media, options: Mapping[str, object], *, tenant: str = "", **_: object) -> Feature:
        del options
        self.seen.append(("process", tenant))
        return drawn(media)

    async def lay_out(self, media: Media, options: Mapping[str, object], *, tenant: str = "", **_: object) -> Layout:
        del options
        self.seen.append(("lay out", tenant))
        return drawn(media).layout

    async def assemble(
        self, token_ids: Sequence[int], items: Sequence[tuple[Modality, Layout]], *, tenant: str = "", **_: object
    ) -> Assembly:
        self.seen.append(("assemble", tenant))
        return Assembly(token_ids, [(index, 0) for index in range(len(items))])


async def test_what_is_inspected_in_the_pool_is_its_tenants(parts_renderer: ChatRenderer) -> None:
    pool = Tenants()
    pipeline = replace(Drawing(parts_renderer, NoCache()).pipeline, process_apart=pool.process, lay_out=pool.lay_out)
    await pipeline.inspector.render(await pipeline.read_chat(chat(1), ACME))
    await pipeline.inspector.features(await pipeline.read_chat(chat(2), ACME), max_bytes=1 << 20)
    assert pool.seen == [("lay out", "acme"), ("process", "acme")]


async def test_what_is_assembled_in_the_pool_is_its_tenants(parts_renderer: ChatRenderer) -> None:
    pool, renderer = Tenants(), replace(parts_renderer, assembly={"image": "apply"})
    pipeline = replace(Drawing(renderer, NoCache()).pipeline, apply=pool.assemble)
    await pipeline.chat(chat(1), ACME)
    assert pool.seen == [("assemble", "acme")]
