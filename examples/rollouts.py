"""The rollouts of an RL loop: a group of answers to each image, its rewards, its advantages, several images at a time.

    semel serve MODEL
    python examples/rollouts.py FOLDER "What is this?" --group 16

A trainer asks for many answers to the same image, in this step and in the next ones. The counters at the end say how
often each image was preprocessed: once, however many answers and steps there are. The reward here is the length of an
answer; put yours in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import mimetypes
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai

from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape


def reward(answer: str) -> float:
    """How good an answer is."""
    return float(len(answer))


def prompt(path: Path, question: str) -> list[Any]:
    """One image and a question."""
    kind = mimetypes.guess_type(path)[0] or "image/jpeg"
    url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    look = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "user", "content": look}]


def preprocessed(url: str) -> float:
    """How many items the frontend has preprocessed until now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return Scrape.parse(answer.read().decode()).total(metrics.POOL_PROCESSED)


async def roll_out(options: argparse.Namespace) -> None:
    """Ask for all groups, in every step."""
    client = openai.AsyncOpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    model = (await client.models.list()).data[0].id
    images = sorted(path for path in options.folder.iterdir() if path.suffix in (".jpg", ".jpeg", ".png", ".webp"))
    turnstile = asyncio.Semaphore(options.at_a_time)

    async def group(path: Path) -> list[float]:
        async with turnstile:
            answer = await client.chat.completions.create(
                model=model,
                messages=prompt(path, options.question),
                n=options.group,
                temperature=1.0,
                max_tokens=options.max_tokens,
            )
        rewards = [reward(choice.message.content or "") for choice in answer.choices]
        mean, spread = statistics.mean(rewards), statistics.pstdev(rewards) or 1.0
        return [(one - mean) / spread for one in rewards]

    for step in range(1, options.steps + 1):
        before, began = preprocessed(options.url), time.perf_counter()
        advantages = await asyncio.gather(*map(group, images))
        took = time.perf_counter() - began
        made = preprocessed(options.url) - before
        rate = f"{len(images) / took:.1f} groups a second"
        print(
            f"step {step}: {len(advantages)} groups of {options.group} answers, {rate}, {made:.0f} images preprocessed"
        )


def main() -> None:
    """Roll out some steps."""
    parser = argparse.ArgumentParser(description="Groups of answers to images.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    asyncio.run(roll_out(parser.parse_args()))


if __name__ == "__main__":
    main()
