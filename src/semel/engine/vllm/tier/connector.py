"""Encoder outputs in the host's memory, as an encoder-output connector of vLLM.

vLLM keeps as many outputs on the device as fit there, and encodes again what was evicted. Here every output is copied
to the host's memory when it is encoded, and comes back from there: `EmbeddingTier` is what vLLM makes, once in its
engine core (`TierBooks`: what is where) and once in each worker process (`copies`: the bytes).

The rule: `has_cache_item` is true only of an output that is on this host, whole, and that nothing overwrites before
every worker process has loaded it. A load that finds nothing would end the engine for everybody. So nothing counts
before a worker process has reported it, a step's loads are those of requests which were scheduled in the end, and they
are pinned until all have reported them (`semel.encoder.transfers`). A key whose output has another number of embeddings
than the request expects is not loaded.

What the embedding process has fetched for a request, and put into the staging part of the memory before it submitted
the request (`semel.encoder.prefetched`), is loaded by the same rule: it is whole, nobody writes there before its lease
is done, and it has the number of embeddings that the request expects, in a form that this engine's own outputs have.
`TierPage` tells that process what is in the host cache, and which leases are done.

Only keys that are digests are kept: with an adapter on the encoder vLLM puts the adapter's name into the key, and a
name says nothing about its weights.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from semel.core import Digest
from semel.encoder.eviction import CostAware, Eviction, OldestReleased
from semel.encoder.host_cache import HostCache, Slot
from semel.encoder.transfers import Step, Transfers
from semel.engine.vllm.compat.internals import num_embeds
from semel.engine.vllm.model.encoder_size import embedding_bytes
from semel.engine.vllm.tier.config import TierConfig, tier_block_bytes, tier_ranks
from semel.engine.vllm.tier.copies import Copies, RankReport, StepMetadata, TierReports, create_copies
from semel.engine.vllm.tier.page import TierPage
from semel.engine.vllm.tier.prefetch_params import Staging

__all__ = ["EmbeddingTier", "TierBooks"]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_IDLE_STEPS: Final = 256
"""Steps without tokens, of a millisecond each, that an engine takes to hear of copies that go on. One or two do."""

_EVICTIONS: Final[Mapping[str, Callable[[], Eviction]]] = {
    "cost-aware": CostAware,
    "oldest-released": OldestReleased,
}

logger = logging.getLogger(__name__)


class TierBooks:
    """The bookkeeping of the host's memory for one engine, and of the copies of each step."""

    def __init__(
        self,
        blocks: int,
        block_bytes: int,
        row_bytes: int,
        *,
        ranks: int = 1,
        eviction: Eviction | None = None,
        staging: Staging | None = None,
        page: TierPage | None = None,
    ) -> None:
        self.host_cache = HostCache(blocks, eviction)
        self.transfers = Transfers(self.host_cache, ranks=ranks)
        self.on_change: Callable[[], None] = _pass
        """Called when a report has changed the totals."""
        self._prefetched_outputs = self.transfers.prefetched_outputs
        self._block_bytes = block_bytes
        self._row_bytes = row_bytes
        self._staging = staging
        self._page = page
        self._widths: set[tuple[int, str]] = set()
        """Columns and type of what this engine's encoder makes."""
        self._epoch = 0
        self._idle_steps = 0
        self.is_on = True
        """False if nothing is saved or loaded any more."""
        self._request: Any = None
        self._features: dict[str, tuple[int, dict[str, Any]]] = {}
        """The items of each request by identifier, and how many it had then. A search for each would be quadratic."""
        self._copied: Counter[str] = Counter()
        self.transfers.on_saved = self._saved
        if page is not None:
            self._epoch = page.epoch
            self.host_cache.on_gone = self._gone
            self._prefetched_outputs.on_use, self._prefetched_outputs.on_done = page.use, page.finish

    @property
    def is_waiting(self) -> bool:
        """True while copies go on of which a step would hear, had the engine one."""
        return self.transfers.is_busy and self._idle_steps < _IDLE_STEPS

    def totals(self) -> dict[str, int]:
        """Return what has been done so far, under the names of `EncoderTotals`."""
        host_cache, counts = self.host_cache, self.transfers.counts
        return {
            **self._copied,
            "tier_loads": counts.loads,
            "tier_prefetched": counts.prefetched_outputs,
            "tier_saves": counts.saves,
            "tier_not_saved": counts.lost + host_cache.counts.full,
            "tier_evictions": host_cache.counts.evictions,
            "tier_capacity_bytes": host_cache.blocks * self._block_bytes,
            "tier_held_bytes": (host_cache.blocks - host_cache.free) * self._block_bytes,
            "tier_pinned_bytes": host_cache.pinned * self._block_bytes,
        }

    def consider(self, request: Any, computed: int = 0) -> None:
        """Set the request for `has`, and how many of its tokens are computed."""
        self._request = request
        if request is not None and request.ec_transfer_params is not None:
            self._receive(request)
            self._prefetched_outputs.advance(request.request_id, computed)

    def has(self, identifier: str) -> bool:
        """Return whether the request in question can have this output loaded."""
        if self._request is None or not self.is_on:
            return False
        slot = self.host_cache.filled(identifier)
        prefetched = self._prefetched_outputs.get(self._request.request_id, identifier)
        if slot is None and prefetched is None:
            return False
        feature = self._features_of(self._request).get(identifier)
        if feature is None:
            return False
        rows = num_embeds(feature)
        if slot is not None and slot.rows == rows:
            return True
        return prefetched is not None and prefetched.form[0] == rows and prefetched.form[1:] in self._widths

    def finish(self, request: Any) -> None:
        """Forget a request that has ended, however."""
        self._features.pop(request.request_id, None)
        if request.ec_transfer_params is not None:
            self._receive(request)  # it may end before it was considered
            self._prefetched_outputs.finish(request.request_id)

    def allocate(self, request: Any, index: int) -> None:
        """Take note that a request has space on the device for an output, to encode or to load it."""
        feature = request.mm_features[index]
        if self.is_on and _DIGEST.fullmatch(feature.identifier) is not None:
            rows = num_embeds(feature)
            blocks = max(1, -(-rows * self._row_bytes // self._block_bytes))
            self.transfers.allocate(request.request_id, index, feature.identifier, rows, blocks)

    def plan(self, scheduler_output: Any) -> Step:
        """Return what a step copies."""
        self._request = None
        self._idle_steps = 0 if scheduler_output.num_scheduled_tokens else self._idle_steps + 1
        return self.transfers.plan(scheduler_output.scheduled_encoder_inputs, scheduler_output.num_scheduled_tokens)

    def take(self, reports: Iterable[RankReport]) -> None:
        """Take the reports of the worker processes."""
        for one in reports:
            self.transfers.take(one.report)
            self._row_bytes = max(self._row_bytes, one.row_bytes)
            if one.has_new_weights:
                self.reset(new_weights=True)
            if one.report.rank == 0:
                self._copied.update(one.copied)
        self.on_change()

    def forget(self, identifiers: Iterable[str]) -> None:
        """Do not load these any more: they are wrong."""
        for identifier in identifiers:
            self.host_cache.forget(identifier)

    def reset(self, *, new_weights: bool = False) -> None:
        """Do not load anything of before: the weights have changed, or an operator wants to be sure."""
        self._epoch += 1
        if self._page is not None:
            self._page.reset(new_weights=new_weights)
        self.host_cache.forget_all()
        self._prefetched_outputs.forget_all()

    def switch_off(self) -> None:
        """Save and load nothing any more: the proof at start has seen other bytes come back."""
        self.is_on = False
        self.reset()

    def _features_of(self, request: Any) -> Mapping[str, Any]:
        count, features = self._features.get(request.request_id, (0, {}))
        if count != len(request.mm_features):  # a request whose input is streamed gets more of them
            features = {one.identifier: one for one in reversed(request.mm_features)}  # the first of equal ones
            self._features[request.request_id] = len(request.mm_features), features
        return features

    def _receive(self, request: Any) -> None:
        """Take what came for a request, once."""
        name = request.request_id
        if name in self._prefetched_outputs or self._staging is None:
            return
        try:
            prefetched_outputs = self._staging.parse(request.ec_transfer_params)
        except ValueError as error:
            logger.warning("request %s comes with nothing that can be loaded: %s", name, error)
            prefetched_outputs = ()
        ends: dict[str, int] = {}
        for feature in request.mm_features:
            place = feature.mm_position
            ends[feature.identifier] = max(place.offset + place.length, ends.get(feature.identifier, 0))
        came = [(one.digest.hex(), one, ends.get(one.digest.hex(), 0)) for one in prefetched_outputs]
        self._prefetched_outputs.add(name, came)
        for key, one, _ in came:
            if one.epoch != self._epoch or key not in ends:
                self._prefetched_outputs.drop(name, key)

    def _saved(self, slot: Slot) -> None:
        form: Any = slot.form
        self._widths.add(form[1:])
        if self._page is not None:
            self._page.saved(_digest_of(slot), slot.transfer, slot.extents, form)

    def _gone(self, slot: Slot) -> None:
        assert self._page is not None
        self._page.gone(_digest_of(slot), slot.transfer)


class EmbeddingTier(ECConnectorBase):  # type: ignore[misc]
    """The connector that vLLM creates, in the engine core and in each worker process."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        model = vllm_config.model_config
        block_bytes = tier_block_bytes(model)
        self.books: TierBooks | None = None
        self._copies: Copies | None = None
        if role == ECConnectorRole.WORKER:
            self._copies = create_copies(vllm_config, block_bytes)
            return
        config = TierConfig.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        staging = config.locate_staging(block_bytes)
        self.books = TierBooks(
            staging.first,
            block_bytes,
            embedding_bytes(model),
            ranks=tier_ranks(vllm_config.parallel_config),
            eviction=_EVICTIONS[config.eviction](),
            staging=staging if staging.blocks else None,
            page=None if config.page is None else TierPage.open(config.page),
        )
        logger.info("the embedding tier has %.2f GB of the host's memory for encoder outputs", config.nbytes / 1e9)

    # In the engine core.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Take note of the request; nothing has to be waited for."""
        assert self.books is not None
        self.books.consider(request, num_computed_tokens)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether an output can be loaded in this step."""
        assert self.books is not None
        return self.books.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Take note that a step encodes or loads an output of a request, unless it preempts the request."""
        assert self.books is not None
        self.books.allocate(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return what the step copies."""
        assert self.books is not None
        step = self.books.plan(scheduler_output)
        return StepMetadata(step) if step.number else _NO_COPIES

    def has_pending_push_work(self) -> bool:
        """Return whether an engine without requests should go on stepping: vLLM asks before it waits for one."""
        return self.books is not None and self.books.is_waiting

    def request_finished(self, request: Any) -> tuple[bool, None]:
        """Forget a request that has ended. vLLM calls this for every one that its scheduler had."""
        assert self.books is not None
        self.books.finish(request)
        return False, None

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the reports of the worker processes from a step's output."""
        reports = connector_output.ec_connector_worker_meta
        if self.books is not None and reports is not None:
            self.books.take(reports.reports)

    # In a worker process.

    def start_load_caches(self, encoder_cache: MutableMapping[str, torch.Tensor], **kwargs: Any) -> None:  # noqa: ARG002
        """Load what the step needs."""
        assert self._copies is not None
        self._copies.load(self._step, encoder_cache)

    def save_caches(self, encoder_cache: Mapping[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:  # noqa: ARG002
        """Save an output that was just encoded."""
        assert self._copies is not None
        self._copies.save(self._step, mm_hash, encoder_cache[mm_hash])

    def forget_saved(self) -> None:
        """Forget what this worker process saved with other weights."""
        if self._copies is not None:
            self._copies.forget()

    def build_connector_worker_meta(self) -> TierReports | None:
        """Return what was done in the step."""
        report = None if self._copies is None else self._copies.report(self._step)
        return None if report is None else TierReports([report])

    def shutdown(self) -> None:
        """Let go of the memory."""
        if self._copies is not None:
            self._copies.close()

    @property
    def _step(self) -> Step:
        metadata: StepMetadata | None = self._connector_metadata
        return _NO_COPIES.step if metadata is None else metadata.step


def _digest_of(slot: Slot) -> Digest:
    return Digest(bytes.fromhex(str(slot.key)))


def _pass() -> None:
    """Do nothing."""


_NO_COPIES: Final = StepMetadata(Step())
