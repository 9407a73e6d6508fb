"""`semel verify`: the proof for a machine that nobody here has: semel answers as bare vLLM does, and is as fast."""
