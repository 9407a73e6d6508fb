"""vLLM's token routes: render and generate."""
