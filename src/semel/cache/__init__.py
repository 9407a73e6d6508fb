"""Caches of features: protocol, implementations (in process, none, shared memory), and one computation per key."""

from semel.cache.flight import Flight
from semel.cache.layouts import LayoutCache
from semel.cache.lru import LruCache, NoCache
from semel.cache.protocol import SMALLEST_BYTES, Cache
from semel.cache.shared import (
    Borrower,
    Head,
    Lease,
    Lender,
    Reservation,
    SharedCache,
    Window,
    borrowed_feature,
    tensor_heads,
    tensor_offsets,
    with_small_copies,
)

__all__ = [
    "SMALLEST_BYTES",
    "Borrower",
    "Cache",
    "Flight",
    "Head",
    "LayoutCache",
    "Lease",
    "Lender",
    "LruCache",
    "NoCache",
    "Reservation",
    "SharedCache",
    "Window",
    "borrowed_feature",
    "tensor_heads",
    "tensor_offsets",
    "with_small_copies",
]
