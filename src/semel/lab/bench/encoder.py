"""`semel bench encoder`: vLLM's encoder bookkeeping and semel's, in one run.

The classes are called as vLLM's scheduler calls them. No model runs, so the figures are the scheduler's CPU time
only: the accelerator may be idle during that time in each step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from semel.core import Mask, Placeholder, Timeline
from semel.encoder.eviction import CostAware, OldestReleased
from semel.encoder.plan import Planner, Request
from semel.encoder.residency import Residency
from semel.lab.bench.eviction import Trace, bound, encode_cost
from semel.lab.bench.report import Check, Report, describe_machine
from semel.lab.bench.stepping import Kind, Stepper
from semel.lab.bench.timing import compare, time_s
from semel.lab.testing.models import build

__all__ = ["run"]

_MANY = 32_768
_ITEM_TOKENS = 4
_STEP_TOKENS = 8_192


def run(*, quick: bool) -> Report:
    """Measure; `quick` ends within a minute, with fewer rounds and a shorter trace."""
    checks = [
        *_release(turns=1 if quick else 3),
        *_window(turns=51 if quick else 201),
        *_planning_step(turns=51 if quick else 201),
        *_engine_step(turns=5 if quick else 15),
        *_counting(turns=51 if quick else 201),
        *_eviction(shows=10_000 if quick else 40_000),
    ]
    return Report("encoder", describe_machine(), tuple(checks))


def _release(turns: int) -> Iterator[Check]:
    """Release every input of a request, as at its end (B5)."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    from semel.engine.vllm.plugins.encoder_cache import EncoderCache

    def releasing(cache_class: Callable[[int], Any], items: int) -> float:
        cache, request = cache_class(items * _ITEM_TOKENS), _vllm_request(items)
        for index in range(items):
            cache.allocate(request, index)
        cache.get_freed_mm_hashes()
        return time_s(lambda: cache.free(request))

    all_items = compare(
        lambda: releasing(EncoderCacheManager, 8_192), lambda: releasing(EncoderCache, 8_192), turns=turns
    )
    yield Check.at_least("releasing 8,192 items, times faster than vLLM", all_items.ratio, 200, unit="×")
    yield Check("releasing 8,192 items", all_items.ours_s * 1e3, "ms", all_items.baseline_s * 1e3)
    one_item = compare(
        lambda: releasing(EncoderCache, _MANY) / _MANY, lambda: releasing(EncoderCache, 1_024) / 1_024, turns=5 * turns
    )
    name = "releasing one of 32,768 items, times the cost of one of 1,024"
    yield Check.at_most(name, one_item.ratio, 2, unit="×")


def _window(turns: int) -> Iterator[Check]:
    """Find which of 32,768 items overlap the next chunk (A5)."""
    from vllm.multimodal.utils import get_mm_features_in_window

    features = _vllm_request(_MANY).mm_features
    timeline = _timeline(_MANY)
    starts = range(0, _MANY * _ITEM_TOKENS, 997)

    def theirs() -> None:
        for start in starts:
            get_mm_features_in_window(features, start, start + _STEP_TOKENS)

    def ours() -> None:
        for start in starts:
            timeline.window(start, start + _STEP_TOKENS)

    found = compare(lambda: time_s(theirs, times=10), lambda: time_s(ours, times=10), turns=turns)
    each = 1e6 / len(starts)
    yield Check.at_least("window among 32,768 items, times faster than vLLM", found.ratio, 4, unit="×")
    yield Check("window among 32,768 items", found.ours_s * each, "µs", found.baseline_s * each)


def _planning_step(turns: int) -> Iterator[Check]:
    """Plan the same 32 items in the window of a short prompt and of a long one (C1)."""

    def planning(items: int) -> Callable[[], float]:
        request = Request("r", _timeline(items), [f"item{index}" for index in range(items)])
        planner = Planner(Residency(_STEP_TOKENS))

        def plan() -> None:
            planner.plan(request, computed=32 * _ITEM_TOKENS, tokens=32 * _ITEM_TOKENS, budget=_STEP_TOKENS)

        return lambda: time_s(plan, times=10)

    found = compare(planning(_MANY), planning(64), turns=turns)
    yield Check.at_most("planning 32 items of 32,768, times the cost of 32 of 64", found.ratio, 1.3, unit="×")
    yield Check("planning 32 items of 32,768", found.baseline_s * 1e6, "µs", found.ours_s * 1e6)


def _engine_step(turns: int) -> Iterator[Check]:
    """vLLM's own scheduler, and the same with semel's plug-ins: one step of 8,192 tokens, planned and answered."""
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        model = build("qwen2-vl", Path(folder) / "model")
        stock, ours = _long_prompt("stock", model), _long_prompt("planning", model)
    first_s, first_ours_s = _step_s(stock), _step_s(ours)
    found = compare(lambda: _step_s(stock), lambda: _step_s(ours), turns=turns)
    yield Check.at_least("scheduler step with 32,768 items, times faster than vLLM", found.ratio, 10, unit="×")
    yield Check("scheduler step with 32,768 items", found.ours_s * 1e3, "ms", found.baseline_s * 1e3)
    yield Check("first scheduler step, which reads the request once", first_ours_s * 1e3, "ms", first_s * 1e3)


def _counting(turns: int) -> Iterator[Check]:
    """Count the embeddings of a masked item, from a list of ints and from a tensor (A2)."""
    import torch

    bits = [position % 9 != 8 for position in range(1_024)]
    mask, counts = Mask(bits), torch.tensor(bits).cumsum(0)
    found = compare(
        lambda: time_s(lambda: int(counts[-1]), times=100), lambda: time_s(lambda: mask.count, times=100), turns=turns
    )
    yield Check.at_least("counting embeddings, times faster than from a tensor", found.ratio, 5, unit="×")
    yield Check("counting embeddings", found.ours_s * 1e6, "µs", found.baseline_s * 1e6)


def _eviction(shows: int) -> Iterator[Check]:
    """Yield the encoding cost of each policy over five seeds, relative to that of oldest-released."""
    traces = [Trace.draw(seed, shows) for seed in range(5)]
    oldest = [encode_cost(trace, OldestReleased()) for trace in traces]
    saved = [1 - encode_cost(trace, CostAware()) / cost for trace, cost in zip(traces, oldest, strict=True)]
    possible = [1 - bound(trace) / cost for trace, cost in zip(traces, oldest, strict=True)]
    name = "encode cost saved by cost-aware eviction"
    yield Check.at_least(name, 100 * sum(saved) / 5, 15, unit="%", baseline=0)
    yield Check("the same, least of five seeds", 100 * min(saved), "%", 0)
    yield Check("the same, no policy can save more than", 100 * sum(possible) / 5, "%", 0)


def _timeline(items: int) -> Timeline:
    return Timeline.decoder(Placeholder(index * _ITEM_TOKENS, _ITEM_TOKENS) for index in range(items))


def _vllm_request(items: int) -> Any:
    """Return a request of vLLM with that many different items."""
    return Stepper.request("r", _items(items), tokens=items * _ITEM_TOKENS + 1)


def _items(count: int) -> list[tuple[str, int, int]]:
    return [(f"item{index}", index * _ITEM_TOKENS, _ITEM_TOKENS) for index in range(count)]


def _long_prompt(kind: Kind, model: Path) -> Stepper:
    tokens = _MANY * _ITEM_TOKENS + 1
    stepper = Stepper.create(
        kind,
        model,
        tokens_per_step=_STEP_TOKENS,
        max_model_len=2 * tokens,
        hf_overrides={"text_config": {"max_position_embeddings": 2 * tokens}},
        limit_mm_per_prompt={"image": _MANY, "video": 0},
    )
    stepper.add("r", _items(_MANY), tokens=tokens)
    return stepper


def _step_s(stepper: Stepper) -> float:
    return time_s(lambda: stepper.answer(stepper.plan()))
