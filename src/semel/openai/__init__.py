"""An HTTP client for the unmodified `openai` and `anthropic` packages that sends each image, clip and video once.

    import openai
    import semel.openai

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", http_client=semel.openai.client())
    client = anthropic.Anthropic(base_url="http://127.0.0.1:8000", http_client=semel.openai.client(library=httpx2))

An agent sends its whole conversation with every turn. This client replaces the media that it has sent before by the ids
that semel returned for them, and sends the bytes again if the server does not have them any more. It changes nothing
else, and leaves servers alone that return no ids. It needs httpx (`semel[client]`).
"""

from semel.openai.memory import Memory
from semel.openai.transport import AsyncTransport, Transport, async_client, client

__all__ = ["AsyncTransport", "Memory", "Transport", "async_client", "client"]
