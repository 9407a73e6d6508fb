"""semel's residency as vLLM's encoder cache manager, the official plug point.

vLLM's scheduler asks about the inputs of one request, one after the other, then allocates KV blocks, which may fail,
and only then allocates what it was promised. So a promise is kept in mind while one request is asked about, and a hit
on a reclaimable entry that would eat into it is answered with no. Nothing is evicted before the allocation.

A step ends with `get_freed_mm_hashes`, which is called once per step. With semel's scheduler the step is settled by
`settle` instead, which also knows who was scheduled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.request import RequestStatus

from semel.encoder.eviction import CostAware, Eviction, Immediate, Key, OldestReleased
from semel.encoder.residency import Residency, Settlement
from semel.engine.owner import end_with_owner
from semel.engine.quick_exit import exit_quickly_when_done
from semel.engine.vllm.compat.internals import num_embeds
from semel.engine.vllm.compat.versions import is_tested
from semel.engine.vllm.plugins.encoder_metrics import EncoderPage, EncoderTotals
from semel.engine.vllm.plugins.lazy_transfer import Shipped
from semel.errors import ConfigError

__all__ = ["EncoderCache", "EncoderCacheConfig"]

logger = logging.getLogger(__name__)

_EVICTIONS: Final[Mapping[str, Callable[[], Eviction]]] = {
    "oldest-released": OldestReleased,
    "cost-aware": CostAware,
}


@dataclass(frozen=True, slots=True)
class EncoderCacheConfig:
    """The values of vLLM's `manager_config`."""

    eviction: str = "oldest-released"
    """The eviction policy: `oldest-released` or `cost-aware`."""
    cost_per_embedding: Mapping[str, float] = field(default_factory=dict)
    """The cost of encoding one embedding, by modality, in any unit; 1 by default. For `cost-aware`."""
    metrics: str | None = None
    """The file to write the encoder's totals to."""
    embeddings: int | None = None
    """Maximum number of embeddings on the device; vLLM's own number by default. Not for encoder-decoders."""

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings, checked."""
        unknown = settings.keys() - set(cls.__slots__)
        if unknown:
            raise ConfigError(
                f"manager_config has no {', '.join(sorted(unknown))}: it takes {', '.join(cls.__slots__)}"
            )
        config = cls(**settings)
        if config.eviction not in _EVICTIONS:
            raise ConfigError(f"unknown eviction {config.eviction!r}: choose one of {', '.join(_EVICTIONS)}")
        if config.embeddings is not None and (type(config.embeddings) is not int or config.embeddings < 1):
            raise ConfigError(f"embeddings must be a whole number of at least 1, not {config.embeddings!r}")
        return config


class EncoderCache(EncoderCacheManager):  # type: ignore[misc]
    """The encoder cache of one engine core."""

    def __init__(
        self,
        cache_size: int,
        config: EncoderCacheConfig | None = None,
        *,
        is_encoder_decoder: bool = False,
        preempts_scheduled: bool = False,
        row: int = 0,
    ) -> None:
        config = config or EncoderCacheConfig()
        eviction = Immediate() if is_encoder_decoder else _EVICTIONS[config.eviction]()
        self.residency = Residency(cache_size, eviction)
        self.cuts = 0
        self.planning_ns = 0
        self.shipped = Shipped()
        self.settles_itself = True
        """True if a step ends when vLLM asks what was freed. semel's scheduler ends it later."""
        self._costs = config.cost_per_embedding
        self._shares = not is_encoder_decoder
        self._preempts_scheduled = preempts_scheduled
        self._page = _open_page(config.metrics) if config.metrics else None
        self._row = row
        self._taken_over = 0
        self._rejected = 0
        self.not_finite = 0
        """Encoder outputs with NaN or infinity in them, as the worker processes say."""
        self._asker = ""
        self._promised = 0
        self._tier_totals: Callable[[], Mapping[str, int]] = dict
        self.write_totals()

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> EncoderCacheManager:
        """Create the manager, for vLLM's scheduler."""
        is_encoder_decoder = vllm_config.model_config.is_encoder_decoder
        missing = "releases in constant time, cancelled encodes (a crash with priority scheduling), encoder metrics"
        if not is_tested("encoder cache", missing):
            stock = EncoderDecoderCacheManager if is_encoder_decoder else EncoderCacheManager
            return stock.create_manager(cache_size=cache_size, vllm_config=vllm_config)
        config = EncoderCacheConfig.parse(vllm_config.ec_manager_config.manager_config)
        end_with_owner()
        exit_quickly_when_done()
        return cls(
            cache_size if is_encoder_decoder else _capacity(config, cache_size),
            config,
            is_encoder_decoder=is_encoder_decoder,
            preempts_scheduled=vllm_config.scheduler_config.policy == "priority",
            row=vllm_config.parallel_config.data_parallel_index,
        )

    @property
    def totals(self) -> EncoderTotals:
        """The running totals of the cache."""
        residency, counts = self.residency, self.residency.counts
        return EncoderTotals(
            queries=counts.queries,
            hits=counts.hits,
            evictions=counts.evictions,
            capacity=residency.capacity,
            resident=residency.capacity - residency.free,
            reclaimable=residency.reclaimable,
            planned=counts.queries - counts.hits,
            cut=self.cuts,
            taken_over=self._taken_over,
            planning_ns=self.planning_ns,
            left_out_bytes=self.shipped.left_out_bytes,
            late_bytes=self.shipped.late_bytes,
            rejected=self._rejected,
            not_finite=self.not_finite,
            **self._tier_totals(),
        )

    def key(self, request: Any, index: int) -> Key:
        """Return the key of an input's encoder output. An encoder-decoder shares none: its every input has its own."""
        identifier = request.mm_features[index].identifier
        return identifier if self._shares else (identifier, request.request_id, index)

    def settle(self, scheduled: Container[str] | None = None) -> Settlement:
        """End the step."""
        settlement = self.residency.settle(scheduled)
        self._taken_over += len(settlement.taken_over)
        self._asker = ""
        self.write_totals()
        return settlement

    def count(self, shipped: Shipped) -> None:
        """Add what a step left out, and what it sent late."""
        if shipped != Shipped():
            self.shipped += shipped
            self.write_totals()

    def include(self, totals: Callable[[], Mapping[str, int]]) -> None:
        """Write the totals of the embedding tier and of grammars as well, which have no page of their own."""
        self._tier_totals = totals
        self.write_totals()

    def reject(self, identifiers: Iterable[str], requests: int) -> None:
        """Forget outputs that are wrong, after so many requests with them were ended."""
        if self._shares:  # of an encoder-decoder every output went with its request
            for identifier in identifiers:
                self.residency.discard(identifier)
        self._rejected += requests
        self.write_totals()

    def identifiers(self, keys: tuple[Key, ...]) -> list[str]:
        """Return the keys as vLLM knows them."""
        return [key[0] if isinstance(key, tuple) else str(key) for key in keys]

    # What vLLM calls.

    def reset(self) -> None:
        """Forget everything: the weights change."""
        self.residency.reset()
        self.write_totals()

    def check_and_update_cache(self, request: Any, input_id: int) -> bool:
        """Return whether the input's encoder output is resident; if so, the request refers to it from now on."""
        key = self.key(request, input_id)
        if self.residency.size(key) is None or self._may_be_cancelled(request, key):
            return False
        promised = self._promised if self._asker == request.request_id else 0
        if not self.residency.can_allocate(self.residency.claim(key), promised=promised):
            return False
        self.residency.hold(request.request_id, input_id, key)
        return True

    def get_cached_num_encoder_embeds(self, request: Any, input_id: int) -> int | None:
        """Return the embeddings of the input's encoder output, if it is resident."""
        return self.residency.size(self.key(request, input_id))

    def can_allocate(
        self, request: Any, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Return whether the input may be encoded, on top of what the request was promised before. Evicts nothing."""
        size = _size(request, input_id)
        if (
            size > encoder_compute_budget
            or not self.residency.can_allocate(size, promised=num_embeds_to_schedule)
            or self._may_be_cancelled(request, self.key(request, input_id))
        ):
            self.cuts += 1
            return False
        self._asker, self._promised = request.request_id, num_embeds_to_schedule + size
        return True

    def allocate(self, request: Any, input_id: int) -> None:
        """Plan the input's encoder output, evicting what has to go."""
        size = _size(request, input_id)
        cost = size * self._costs.get(request.mm_features[input_id].modality, 1.0) if self._costs else None
        self._asker = ""
        self.residency.allocate(request.request_id, input_id, self.key(request, input_id), size, cost=cost)

    def get_cached_input_ids(self, request: Any) -> Any:
        """Return the inputs of the request that refer to a resident encoder output."""
        return self.residency.held_inputs(request.request_id)

    def free_encoder_input(self, request: Any, input_id: int) -> None:
        """Release an input that the request has used."""
        self.residency.release(request.request_id, input_id)

    def free(self, request: Any) -> None:
        """Release all inputs of a request that ended, was preempted, or was not scheduled after all."""
        self._asker = ""
        self.residency.release_all(request.request_id)

    def get_freed_mm_hashes(self) -> list[str]:
        """Return what was evicted in this step."""
        evicted = self.settle().evicted if self.settles_itself else self.residency.evicted()
        return self.identifiers(evicted)

    @property
    def cache_size(self) -> int:
        """The capacity, under vLLM's name."""
        return self.residency.capacity

    @property
    def num_free_slots(self) -> int:
        """Free embeddings, under vLLM's name."""
        return self.residency.free

    @property
    def num_freeable_slots(self) -> int:
        """Free and reclaimable embeddings, under vLLM's name."""
        return self.residency.free + self.residency.reclaimable

    def _may_be_cancelled(self, request: Any, key: Key) -> bool:
        """Return whether a running request would rely on an encode that may still be cancelled in this step (B7).

        With priority scheduling, vLLM preempts requests that it has scheduled in the same step, but only while it
        goes through the running ones. A request that runs and meets an item which another one plans to encode in this
        step waits for the next: one step is cheaper than to encode the item twice. semel's scheduler need not wait.
        """
        if not (self._preempts_scheduled and self.settles_itself) or request.status != RequestStatus.RUNNING:
            return False
        planner = self.residency.planner(key)
        return planner is not None and planner[0] != request.request_id

    def write_totals(self) -> None:
        """Let others see what the cache has done."""
        if self._page is not None:
            self._page.write(self._row, self.totals)


def _open_page(path: str) -> EncoderPage | None:
    """Return the page for the totals; None for one that its process has taken along, or shows on another machine."""
    if not path.startswith("/proc/"):
        return EncoderPage.open(path)
    try:
        return EncoderPage.attach(path)
    except OSError as error:
        logger.warning("the encoder's metrics are not written: %s", error)
        return None


def _capacity(config: EncoderCacheConfig, of_vllm: int) -> int:
    """Return the capacity in embeddings: never below vLLM's own number, which has room for the largest item."""
    if config.embeddings is not None and config.embeddings < of_vllm:
        logger.warning("the encoder cache holds %d embeddings, not %d, as vLLM's does", of_vllm, config.embeddings)
    return max(config.embeddings or 0, of_vllm)


def _size(request: Any, index: int) -> int:
    """Return the embeddings of an input."""
    return num_embeds(request.mm_features[index])
