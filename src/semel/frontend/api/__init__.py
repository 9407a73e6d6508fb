"""Requests and responses in the shapes of OpenAI and vLLM. No I/O.

A response is described once: its builder returns the type that the OpenAPI document is made from. The document says
that these types are closed: mypy catches a field too many or too few in a builder, `tests/frontend/test_openapi.py` in
what is sent. What is always null, vLLM has and semel never fills.
"""
