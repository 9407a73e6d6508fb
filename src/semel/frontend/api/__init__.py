"""Requests and responses in the shapes of OpenAI and vLLM. No I/O.

Each response is described once: its builder returns the type from which the OpenAPI document is made. The document
declares these types closed. mypy finds a missing or an extra field in a builder; `tests/frontend/test_openapi.py` finds
one in a response. A field that is always null is a field of vLLM that semel never fills.
"""
