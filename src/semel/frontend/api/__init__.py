"""Requests and responses in the shapes of OpenAI and vLLM. No I/O."""
