"""A policy that learns: groups of answers from a running worker, a gradient step here, the new weights back into it.

    semel key admin.key
    VLLM_SERVER_DEV_MODE=1 semel serve MODEL --dtype float32 --admin-port 9100 --admin-key-file admin.key
    python examples/train_policy.py MODEL FOLDER --admin-key-file admin.key

For small models: it trains on a CPU, with transformers, and hands weights over in a folder that the worker reads. The
reward is the share of even token ids; put yours in its place. Each step says how far the worker's log probabilities are
off the trainer's (next to nothing, or it has other weights), and how many PNG images were preprocessed: each one once.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape


def reward(token_ids: list[int]) -> float:
    """How good an answer is."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


class Trainer:
    """The trainer's copy of the policy."""

    def __init__(self, options: argparse.Namespace, images: list[Path]) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        process = AutoImageProcessor.from_pretrained(options.model)
        self.features = {path: process([Image.open(path).convert("RGB")], return_tensors="pt") for path in images}

    def log_probabilities(self, path: Path, choices: list[list[int]], asked: list[int]) -> torch.Tensor:
        """The log probability of each token of the answers to an image."""
        ids = torch.tensor([asked + choice for choice in choices])
        seen = {name: torch.cat([value] * len(choices)) for name, value in self.features[path].items()}
        kinds = (ids == self.model.config.image_token_id).int()
        logits = self.model(input_ids=ids, mm_token_type_ids=kinds, **seen).logits[:, len(asked) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, ids[:, len(asked) :, None])[..., 0]

    def learn(self, path: Path, answer: Any) -> tuple[float, float]:
        """Add a group's gradient; returns its mean reward, and how far the worker's log probabilities are off."""
        choices = [choice.token_ids for choice in answer.choices]
        rewards = torch.tensor([reward(choice) for choice in choices])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        found = self.log_probabilities(path, choices, answer.prompt_token_ids)
        (-(advantages[:, None] * found).mean()).backward()
        sampled = torch.tensor([[token.logprob for token in choice.logprobs.content] for choice in answer.choices])
        return float(rewards.mean()), float((found.detach() - sampled).abs().max())


def train(options: argparse.Namespace, weights: Path) -> None:
    """Sample, learn and update, step after step."""
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key="none")
    name = client.models.list().data[0].id
    images = sorted(options.folder.glob("*.png"))
    trainer = Trainer(options, images)
    never = {str(trainer.model.config.image_token_id): -100}  # an answer must not have what stands for an image

    def group(path: Path) -> Any:
        url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        sampling: Any = {"n": 16, "max_tokens": 16, "temperature": 1.0, "logprobs": True, "logit_bias": never}
        extra = {"return_token_ids": True, "ignore_eos": True}
        asked: Any = {"model": name, "messages": [{"role": "user", "content": content}], "extra_body": extra}
        return client.chat.completions.create(**asked, **sampling)

    def preprocessed() -> float:
        return Scrape.parse(httpx.get(f"{options.url}/metrics").text).total(metrics.POOL_PROCESSED)

    key, before = options.admin_key_file.read_text().strip(), preprocessed()
    admin = httpx.Client(base_url=options.admin, headers={"Authorization": f"Bearer {key}"}, timeout=600)
    with admin, ThreadPoolExecutor() as threads:
        for step in range(1, options.steps + 1):
            answers = list(threads.map(group, images))
            learned = [trainer.learn(path, answer) for path, answer in zip(images, answers, strict=True)]
            mean, off = sum(got for got, _ in learned) / len(learned), max(off for _, off in learned)
            print(
                f"step {step}: reward {mean:.3f}, off by {off:.0e}, {preprocessed() - before:.0f} images preprocessed"
            )
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            trainer.model.save_pretrained(weights)
            for path, body in (
                ("/pause?mode=wait", None),
                ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}),
                ("/update_weight_version", {"new_version": f"step-{step}"}),
                ("/resume", None),
            ):
                admin.post(path, json=body).raise_for_status()


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description="A policy that learns, with weights in a running worker.")
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--admin", default="http://127.0.0.1:9100")
    parser.add_argument("--admin-key-file", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="policy-") as weights:
        train(options, Path(weights))


if __name__ == "__main__":
    main()
