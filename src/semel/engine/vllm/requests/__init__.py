"""The way of a request into vLLM's engine and of its outputs back."""
