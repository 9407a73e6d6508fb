"""Frontends: OpenAI's API over HTTP, without torch or vLLM in the serving process."""
