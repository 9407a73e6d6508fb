"""Features in memory that local processes share: the cache, its segment, and leases on its ranges."""

from semel.cache.shared.arena import ALIGNMENT, Arena
from semel.cache.shared.borrower import Borrower
from semel.cache.shared.cache import Reservation, SharedCache
from semel.cache.shared.lender import Lender
from semel.cache.shared.packing import Head, borrowed_feature, tensor_heads, tensor_offsets, with_small_copies
from semel.cache.shared.segment import Lease, Segment, Window

__all__ = [
    "ALIGNMENT",
    "Arena",
    "Borrower",
    "Head",
    "Lease",
    "Lender",
    "Reservation",
    "Segment",
    "SharedCache",
    "Window",
    "borrowed_feature",
    "tensor_heads",
    "tensor_offsets",
    "with_small_copies",
]
