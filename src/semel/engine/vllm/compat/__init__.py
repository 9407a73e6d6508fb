"""vLLM's private names, versions, flags and parsers: one table, checked at start."""
