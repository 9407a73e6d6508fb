"""Probes: small media that frontends and workers decode and process when they start, to compare what comes out."""

from semel.processing.probes.catalogue import catalogue_id, probe_names
from semel.processing.probes.results import proven_fingerprint, run_probes

__all__ = ["catalogue_id", "probe_names", "proven_fingerprint", "run_probes"]
