"""The path of inspections: computes what a request would become, without executing it (requirement E1).

It cannot change the feature cache, its order, its counters or its flight, because it has no reference to them. It needs
only the layouts of items: from the workers' announcements, or from a layout cache that both paths fill. Only an item
that is in neither goes to the pool, which makes a feature only if the client requested tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from semel.aio import concurrently
from semel.cache import Flight, LayoutCache
from semel.core import Digest, Feature, Layout, item_options
from semel.errors import MediaTooLarge
from semel.render.media.parsed_request import (
    ComputeLayout,
    FeatureInfoOf,
    ParsedRequest,
    ProcessItem,
    Rendered,
    nothing_known,
)
from semel.render.media.source_fetch import Spend

__all__ = ["Inspector"]


@dataclass(frozen=True, slots=True)
class Inspector:
    """Renders parsed requests for inspection."""

    process: ProcessItem
    """Must not write to the feature cache either."""

    layouts: LayoutCache[Digest]
    flight: Flight[Digest, Feature] = field(default_factory=Flight, repr=False)
    lay_out: ComputeLayout | None = None
    """Computes a layout without a feature. If None, the layout is taken from a feature."""

    looks: Flight[Digest, Layout] = field(default_factory=Flight, repr=False)

    async def render(self, request: ParsedRequest, holding: FeatureInfoOf = nothing_known) -> Rendered:
        """Make the prompt of a parsed request, without features."""
        layouts: dict[Digest, Layout] = {}

        def find(digest: Digest) -> bool:
            info = holding(digest)
            layout = self.layouts.get(digest) if info is None else info.layout
            if layout is None:
                return False
            layouts[digest] = layout
            return True

        async def find_or_make(digest: Digest) -> None:
            if not find(digest):  # it may have become known while this one waited
                layouts[digest] = await self._look(request, digest)

        await concurrently([digest for digest in request.media if not find(digest)], find_or_make)
        prompt = await request.assemble([layouts[item.digest] for item in request.items])
        return Rendered(prompt, {}, partial(self.make, request))

    async def features(
        self, request: ParsedRequest, *, max_bytes: int, spend: Spend = lambda _: None
    ) -> Mapping[Digest, Feature]:
        """Return the features of all items, in order. Refused as soon as their total exceeds `max_bytes`.

        `spend` is called with the size of each before it is stored; the size is known only after the feature is made.
        """
        made: dict[Digest, Feature] = {}
        nbytes = 0

        async def take(digest: Digest) -> None:
            nonlocal nbytes
            feature = await self.make(request, digest)
            nbytes += feature.nbytes
            if nbytes > max_bytes:
                raise MediaTooLarge(
                    f"the tensors of these items have more than {max_bytes:,} bytes: ask for fewer items at a time"
                )
            spend(feature.nbytes)
            made[digest] = feature

        await concurrently(request.media, take)
        return {digest: made[digest] for digest in request.media}

    async def _look(self, request: ParsedRequest, digest: Digest) -> Layout:
        if (lay_out := self.lay_out) is None:
            return (await self.make(request, digest)).layout

        async def work() -> Layout:
            media = await request.media_of(digest)
            options = item_options(media.modality, request.options)
            layout = await lay_out(media, options, group=request, tenant=request.tenant)
            self.layouts.put(digest, layout)
            return layout

        with request.naming(digest):
            return await self.looks.do(digest, work)

    async def make(self, request: ParsedRequest, digest: Digest) -> Feature:
        """Process an item's feature. Equal inspections in flight share one computation."""

        async def work() -> Feature:
            media = await request.media_of(digest)
            options = item_options(media.modality, request.options)
            feature = await self.process(media, options, group=request, tenant=request.tenant)
            self.layouts.put(digest, feature.layout)
            return feature

        with request.naming(digest):
            return await self.flight.do(digest, work)
