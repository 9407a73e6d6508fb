"""Measured comparisons with bare vLLM or the physical limit. Every benchmark has one shape: `semel.bench.report`."""
