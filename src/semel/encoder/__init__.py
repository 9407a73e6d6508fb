"""What stays and what to encode: pure decisions over keys, sizes and timelines.

`residency` says which encoder outputs stay, `eviction` which one goes first, `plan` what to encode this step, `gather`
where the embeddings of a step go. Keys are opaque (in semel they are digests), requests are ids, inputs are indices
into a request's timeline. Nothing here knows an engine, a clock or a tensor.
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
