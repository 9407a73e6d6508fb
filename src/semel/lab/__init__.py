"""The workshop: benchmarks, the proof against bare vLLM, the simulator, tiny models; the product imports none of it."""
