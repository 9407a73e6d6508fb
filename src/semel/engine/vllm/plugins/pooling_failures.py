"""Failures of requests that pool, on their way from the scheduler to the client of the engine.

vLLM gives a request that pools one output, a tensor, and dies where it gets none: its output processor takes the end
without one for the end of an answer of tokens. So the scheduler gives a failed request a tensor of bytes, its reason.
No model makes one of that dtype.
"""

from __future__ import annotations

from typing import Any

__all__ = ["failure_reason", "fill_failures"]

_UNNAMED = "failed"


def fill_failures(outputs: Any) -> None:
    """Give each request of a step that failed its reason as the output."""
    import torch
    from vllm.v1.engine import FinishReason

    for of_client in outputs.values():
        for output in of_client.outputs:
            if output.finish_reason == FinishReason.ERROR and output.pooling_output is None:
                reason = str(output.stop_reason or _UNNAMED).encode()
                output.pooling_output = torch.frombuffer(bytearray(reason), dtype=torch.uint8)


def failure_reason(data: Any) -> str | None:
    """Return the reason in the output of a request; None if it was pooled."""
    import torch

    return bytes(data.tolist()).decode(errors="replace") if data.dtype == torch.uint8 else None
