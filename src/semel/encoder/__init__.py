"""The encoder cache's decisions: pure functions of keys, sizes and timelines.

`residency` decides which encoder outputs stay, `eviction` which is evicted first, `plan` what to encode in a step, and
`gather` which positions a step's embeddings fill. `host_cache` knows the outputs in the host's memory, over the free
blocks of `extents`, `prefetched` those that came for one request, and `transfers` what a step copies. Keys are opaque
(semel uses digests), requests are ids, and inputs are indices into a request's timeline. Nothing here depends on an
engine, a clock or a tensor.
"""

from semel.encoder.eviction import CostAware, Entry, Eviction, Immediate, OldestReleased
from semel.encoder.gather import Gathered, Slice, gather
from semel.encoder.host_cache import HostCache, HostCacheCounts, Slot
from semel.encoder.plan import Plan, Planner, Request
from semel.encoder.prefetched import PrefetchedOutputs
from semel.encoder.residency import Counts, Key, Reference, Residency, Settlement
from semel.encoder.transfers import Load, Report, Save, Saved, Step, TransferCounts, Transfers

__all__ = [
    "CostAware",
    "Counts",
    "Entry",
    "Eviction",
    "Gathered",
    "HostCache",
    "HostCacheCounts",
    "Immediate",
    "Key",
    "Load",
    "OldestReleased",
    "Plan",
    "Planner",
    "PrefetchedOutputs",
    "Reference",
    "Report",
    "Request",
    "Residency",
    "Save",
    "Saved",
    "Settlement",
    "Slice",
    "Slot",
    "Step",
    "TransferCounts",
    "Transfers",
    "gather",
]
