"""Caches of features: protocol, implementations (in process, none, shared memory), and one computation per key."""

from semel.cache.flight import Flight
from semel.cache.lru import LayoutCache, LruCache, NoCache
from semel.cache.protocol import SMALLEST_BYTES, Cache
from semel.cache.shared.borrower import Borrower
from semel.cache.shared.cache import Reservation, SharedCache
from semel.cache.shared.lender import Lender
from semel.cache.shared.packing import Head, borrowed_feature, tensor_heads, tensor_offsets, with_small_copies
from semel.cache.shared.segment import Lease, Window

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
