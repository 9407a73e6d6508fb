"""A bug in a decoder of images, planted into every process of vLLM by a plug-in: it crashes over some files."""

from __future__ import annotations

import os
import signal
from typing import Any

__all__ = ["DEADLY", "plant"]

DEADLY = b"crash the decoder"


def plant() -> None:
    """Crash the process that opens a file with these bytes in it."""
    from PIL import Image

    own = Image.open

    def hostile(fp: Any, *arguments: Any, **settings: Any) -> Any:
        if hasattr(fp, "getvalue") and DEADLY in fp.getvalue():
            os.kill(os.getpid(), signal.SIGSEGV)
        return own(fp, *arguments, **settings)

    Image.open = hostile
