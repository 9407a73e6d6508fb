"""Measured comparisons with bare vLLM or the physical limit. All have one shape: `semel.lab.bench.report`."""
