"""`semel prove`: a fleet under fire, each answer compared with bare vLLM's."""
