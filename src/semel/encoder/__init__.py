"""The encoder cache's decisions: pure functions of keys, sizes and timelines.

`residency` decides which encoder outputs stay, `eviction` which is evicted first, `plan` what to encode in a step, and
`gather` which positions a step's embeddings fill. Keys are opaque (semel uses digests), requests are ids, and inputs
are indices into a request's timeline. Nothing here depends on an engine, a clock or a tensor.
"""

from semel.encoder.eviction import CostAware, Entry, Eviction, Immediate, OldestReleased
from semel.encoder.gather import Gathered, Slice, gather
from semel.encoder.plan import Plan, Planner, Request
from semel.encoder.residency import Counts, Key, Reference, Residency, Settlement

__all__ = [
    "CostAware",
    "Counts",
    "Entry",
    "Eviction",
    "Gathered",
    "Immediate",
    "Key",
    "OldestReleased",
    "Plan",
    "Planner",
    "Reference",
    "Request",
    "Residency",
    "Settlement",
    "Slice",
    "gather",
]
