"""Classes that run inside vLLM's own processes: scheduler, encoder cache, worker."""
