"""One process: semel's preprocessing and vLLM's engine as a library, without a server.

    python examples/library.py MODEL_FOLDER

`semel testing model qwen2-vl MODEL_FOLDER` makes a tiny model for it.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path

from semel import Key
from semel.compose import compose_pipeline
from semel.core import Submission
from semel.engine.vllm.arguments import parse_engine_flags
from semel.engine.vllm.engine import VllmEngine
from semel.render import ChatRequest

IMAGE = Path(__file__).parent.parent / "docs/once.png"
FLAGS = "--enforce-eager --dtype float32 --max-model-len 4096 --kv-cache-memory-bytes 1G"  # any of vLLM's


async def main(folder: Path) -> None:
    """Ask the model of a folder about one image."""
    engine = VllmEngine.start(parse_engine_flags(str(folder), FLAGS.split()))
    pipeline = compose_pipeline(folder, engine.contract.target, Key(bytes(32)))
    image = base64.b64encode(IMAGE.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "What is this?"},
    ]
    rendered = await pipeline.chat(ChatRequest([{"role": "user", "content": content}]))
    submission = Submission("1", rendered.prompt, rendered.features, {"max_tokens": 8, "temperature": 0.0})
    async for output in await engine.submit(submission):
        print(output.token_ids, output.text)
    await engine.close()


if __name__ == "__main__":  # vLLM starts its processes by importing this file again
    asyncio.run(main(Path(sys.argv[1])))
