"""Processing: features from media, and the fingerprint that says when two of them are the same."""

from semel.processing.families import FAMILIES, Family, family_of
from semel.processing.fingerprint import fingerprint
from semel.processing.folder import find_folder, read_config
from semel.processing.hf import HfProcessor
from semel.processing.pool.pipe import Description
from semel.processing.pool.pool import Pool
from semel.processing.tensors import from_torch, to_torch

__all__ = [
    "FAMILIES",
    "Description",
    "Family",
    "HfProcessor",
    "Pool",
    "family_of",
    "find_folder",
    "fingerprint",
    "from_torch",
    "read_config",
    "to_torch",
]
