"""semel's encoder cache as a library, in a scheduler of one's own: no engine, no GPU, no vLLM.

    python examples/scheduler.py

Four chats show three images to an encoder that has room for two. Each step has a budget of tokens and one of
embeddings; `Planner` says what a chat may compute and encode in it, `Residency` which outputs stay and which go.
An engine would drop the tensors of `evicted`, encode those of `encodes`, and find all others where it left them.
"""

from __future__ import annotations

from dataclasses import dataclass

from semel.core import Placeholder, Timeline
from semel.encoder.plan import Planner, Request
from semel.encoder.residency import Residency

IMAGE = 64
"""Embeddings of an image, and the tokens that it takes up in a prompt."""
TOKENS_PER_STEP = 160
EMBEDDINGS_PER_STEP = 64


@dataclass
class Chat:
    """A request, and how far it has come."""

    request: Request
    length: int
    computed: int = 0


def chat(name: str, *images: str) -> Chat:
    """A prompt of 16 words before each of its images, and 16 at its end."""
    spans = [Placeholder(16 + turn * (16 + IMAGE), IMAGE) for turn in range(len(images))]
    return Chat(Request(name, Timeline.decoder(spans), images), len(images) * (16 + IMAGE) + 16)


def step(planner: Planner, waiting: list[Chat]) -> str:
    """Give every chat its turn with what is left of the budgets; what was done, in words."""
    tokens, embeddings, said = TOKENS_PER_STEP, EMBEDDINGS_PER_STEP, []
    for each in waiting:
        wanted = min(tokens, each.length - each.computed)
        plan = planner.plan(each.request, computed=each.computed, tokens=wanted, budget=embeddings)
        planner.commit(each.request, plan)
        tokens, embeddings = tokens - plan.tokens, plan.budget
        encoded = [f"encodes the {each.request.keys[index]}" for index in plan.encodes]
        found = [f"finds the {each.request.keys[index]}" for index in plan.hits]
        said.append(", ".join([f"{each.request.id} computes {plan.tokens} tokens", *encoded, *found]))
        each.computed += plan.tokens
    settlement = planner.residency.settle()
    for each in waiting:
        for index, span in enumerate(each.request.timeline):
            if span.end <= each.computed:  # its embeddings are in the KV cache now
                planner.residency.release(each.request.id, index)
    said += [f"the {key} has to go" for key in settlement.evicted]
    return "; ".join(said)


def main() -> None:
    """Run until every prompt is computed."""
    residency = Residency(capacity=2 * IMAGE)
    planner = Planner(residency)
    chats = [chat("ann", "cat"), chat("bob", "dog", "cat"), chat("cleo", "cat"), chat("dan", "owl", "dog")]
    number = 0
    while waiting := [each for each in chats if each.computed < each.length]:
        number += 1
        print(f"step {number}: {step(planner, waiting)}")
    counts = residency.counts
    print(f"{counts.queries} uses of images, {counts.queries - counts.hits} encodes, {counts.evictions} evictions")


if __name__ == "__main__":
    main()
