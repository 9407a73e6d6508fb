"""Grammars that are expensive to follow, in several forms: `scripts/grammars --forms` prints a table (threats S27).

A real `semel serve` of a tiny model is started in three modes: synchronous, asynchronous (vLLM's asynchronous
scheduling), and with ngram drafts. One tenant sends each form; another one has four chats of 8 tokens a second, every
fourth of them held to an ordinary schema. The vocabulary has a token of 48 equal characters, for which one call of
xgrammar takes over 20 s. Then the 25 ordinary schemas, expressions and grammars of `test_s27_trial` are sent, and once
more next to six busy loops: none may be ended.

The limits are the p95 of the other tenant: 1 s, and 0.3 s where the trial refuses the form. The exit code is 1 if one
is missed, if a chat of the other tenant failed, or if the form did not end as it should.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import httpx

from semel.lab.testing.models import build
from tests.security.test_s27_trial import ORDINARY
from tests.serve.served import sum_of
from tools.engine.matrix import SHIMS
from tools.security.attacker import CHAT, KEYS, chat, text
from tools.security.target import Target, running

LONG_TOKEN: Final = "Q" * 48
_NGRAM: Final = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "sync": (),
    "async": ("--async-scheduling",),
    "drafts": ("--speculative-config", json.dumps(_NGRAM)),
}
COLUMNS: Final = (
    *("form", "mode", "p95 alone", "p95", "limit", "failed", "the attacker's answers"),
    *("CPU of the engine core", "of that following", "ended there", "verdict"),
)
MAX_P95_S: Final = 1.0
MAX_REFUSED_P95_S: Final = 0.3
ALONE_S: Final = 4.0
VICTIM_S: Final = 0.25
SCHEMA_EVERY: Final = 4
UNANSWERED_S: Final = 20.0
MAX_LOOKS: Final = 30
HARMLESS: Final = (("25 ordinary ones", "alice", 0), ("25 ordinary ones, six busy loops", "mallory", 6))
"""By which tenant, since each has trials of its own, and next to how many busy loops."""


@dataclass(frozen=True)
class Form:
    """A way to make following expensive."""

    name: str
    kind: str
    content: str
    """With the number of the request in it, so that none is known yet."""

    is_refused: bool = False
    """Whether the trial finds it; otherwise the engine core has to hold it."""

    sequences: int = 1
    lead_s: float = 1.0
    """Until it is expensive."""

    def body(self, number: int, bias: Mapping[str, int]) -> dict[str, object]:
        """Return a request that stays with the tokens of the bias; vLLM takes none with drafts: then it has to stay."""
        content = self.content
        fields: dict[str, object] = {"max_tokens": 1_500, "temperature": 1.0, "n": self.sequences}
        if bias:
            fields["logit_bias"] = bias
        else:
            content = content.replace("{0,NUMBER}", "{190,NUMBER}").replace("[b-z]", "[b-d]")
        return chat(text("a"), structured_outputs={self.kind: content.replace("NUMBER", str(200 + number))}, **fields)


_REGEX: Final = "(a{0,30}){0,30}(a|aa){0,NUMBER}b"
_UNTAKEN: Final = "[b-z]{900}|aaaab"
"""A walk on trial takes one of the other letters, and stays there."""

FORMS: Final = (
    Form("regex", "regex", _REGEX, is_refused=True),
    Form("`e e e`", "grammar", 'root ::= e "NUMBER"\ne ::= e e e | e e | "a" | "aa"', is_refused=True),
    Form("token of 48 equal characters", "regex", _REGEX.replace("a", "Q"), is_refused=True),
    Form("cheap prefix `x{600}`", "regex", f"x{{600}}{_REGEX}", lead_s=6.0),
    Form("branch not taken on trial", "regex", f"{_UNTAKEN}{_REGEX}"),
    Form("28 sequences, 45 ms each", "regex", f"{_UNTAKEN}(a{{0,13}}){{0,13}}(a|aa){{0,NUMBER}}b", sequences=28),
    Form("token of 48, branch not taken", "regex", _UNTAKEN + _REGEX.replace("a", "Q")),
)


@dataclass
class Seen:
    """The figures of two tenants for a while."""

    victim_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Of the attacker."""

    def p95_s(self) -> float:
        ordered = sorted((*self.victim_s, *(float("inf") for _ in range(self.failures.total()))))
        return ordered[int(0.95 * (len(ordered) - 1))] if ordered else float("inf")


class Counters(NamedTuple):
    """The resources that an engine has used."""

    core_s: float
    following_s: float
    ended: float
    abandoned: float

    @classmethod
    async def read(cls, target: Target) -> Self:
        times = target.engine_core().cpu_times()
        async with httpx.AsyncClient(base_url=target.worker_url, timeout=30) as client:
            metrics = (await client.get("/metrics")).text
        names = ("following_seconds_total", "ended_total", "abandoned_threads")
        return cls(times.user + times.system, *(sum_of(metrics, f"semel_grammar_{name}") for name in names))


def client_of(target: Target, tenant: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.AsyncClient(base_url=target.url, headers=headers, timeout=120)


async def end_of(client: httpx.AsyncClient, body: object) -> str:
    """Send a chat; how it ended."""
    try:
        response = await client.post(CHAT, json=body)
    except httpx.HTTPError as error:
        return type(error).__name__
    if response.status_code == httpx.codes.OK:
        return "200"
    is_cost = response.status_code == httpx.codes.BAD_REQUEST and "CPU time" in response.text
    said = "expensive" if is_cost else response.json()["error"]["message"][:80]
    return f"{response.status_code} {said}"


@contextlib.asynccontextmanager
async def victim(target: Target, seen: Seen) -> AsyncIterator[None]:
    """Four chats a second go on meanwhile, whatever became of those before; at the end they are waited for."""
    schema = {"structured_outputs": {"json": ORDINARY[0][1]}}

    async def one(number: int) -> None:
        held = schema if number % SCHEMA_EVERY == 0 else {"ignore_eos": True}
        began = time.monotonic()
        end = await end_of(client, chat(text(f"Tell me of {number}."), max_tokens=8, **held))
        if end == "200":
            seen.victim_s.append(time.monotonic() - began)
        else:
            seen.failures[end] += 1

    async def send() -> None:
        for number in itertools.count():
            chats.append(asyncio.create_task(one(number)))
            await asyncio.sleep(VICTIM_S)

    chats: list[asyncio.Task[None]] = []
    async with client_of(target, "alice") as client:
        sending = asyncio.create_task(send())
        try:
            yield
        finally:
            sending.cancel()
            seen.failures["unanswered"] += len((await asyncio.wait(chats, timeout=UNANSWERED_S))[1])


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    mode: str
    form: Form | None
    """None for what is harmless: it has no limit, and has to be answered."""

    alone: Seen
    seen: Seen
    used: Counters

    @property
    def limit_s(self) -> float:
        return float("inf") if self.form is None else MAX_REFUSED_P95_S if self.form.is_refused else MAX_P95_S

    def faults(self) -> list[str]:
        form, seen, ends = self.form, self.seen, set(self.seen.answers)
        faults = {
            "p95": seen.p95_s() > self.limit_s,
            f"failed: {dict(+seen.failures)}": seen.failures.total() > 0,
            "ended": form is None and (ends != {"200"} or self.used.ended > 0),
            "not refused on trial": form is not None and form.is_refused and ends != {"400 expensive"},
            "not expensive": form is not None and not form.is_refused and self.used.ended + self.used.following_s < 1,
            "wrong end": any(end[:3] not in ("200", "400", "429") for end in ends),
        }
        return [f"not ok: {fault}" for fault, is_so in faults.items() if is_so]

    def cells(self) -> list[str]:
        seen = self.seen
        return [
            *(self.name, self.mode),
            *(f"{seconds:.3g} s" for seconds in (self.alone.p95_s(), seen.p95_s(), self.limit_s)),
            f"{seen.failures.total()} of {len(seen.victim_s) + seen.failures.total()}",
            ", ".join(f"{count} × {end}" for end, count in seen.answers.most_common()) or "none ended",
            *(f"{self.used.core_s:.1f} s", f"{self.used.following_s:.1f} s", f"{self.used.ended:g}"),
            "; ".join(self.faults()) or "ok",
        ]


async def watch(
    target: Target, mode: str, name: str, work: Callable[[Seen], Awaitable[None]], form: Form | None
) -> Line:
    """Watch the victim alone, when nothing of what went on before is left, and while something goes on."""
    alone, seen = Seen(), Seen()
    async with victim(target, Seen()):  # the engine writes its counters as it steps, once a second
        for _ in range(MAX_LOOKS):
            await asyncio.sleep(2)
            if (await Counters.read(target)).abandoned == 0:
                break
    async with victim(target, alone):
        await asyncio.sleep(ALONE_S)
    before = await Counters.read(target)
    await work(seen)
    await asyncio.sleep(1.5)
    used = Counters(*(now - then for now, then in zip(await Counters.read(target), before, strict=True)))
    return Line(name, mode, form, alone, seen, used)


async def attack(target: Target, mode: str, form: Form, seconds: float, seen: Seen) -> None:
    """Send a form with two clients next to the victim, each request with a number of its own."""

    async def send(client: httpx.AsyncClient, bias: Mapping[str, int]) -> None:
        while True:
            seen.answers[await end_of(client, form.body(next(numbers), bias))] += 1

    numbers = itertools.count()
    async with client_of(target, "mallory") as client:
        answers = [await client.post("/tokenize", json={"prompt": one, "add_special_tokens": False}) for one in "xaQ"]
        bias = {str(answer.json()["tokens"][-1]): 100 for answer in answers} if mode != "drafts" else {}
        sending = [asyncio.create_task(send(client, bias)) for _ in range(2)]
        await asyncio.sleep(form.lead_s)
        async with victim(target, seen):
            await asyncio.sleep(seconds)
        for one in sending:
            one.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def send_ordinary(target: Target, tenant: str, seen: Seen) -> None:
    """Send what people send, next to the victim."""
    async with client_of(target, tenant) as client, victim(target, seen):
        for kind, content in ORDINARY:
            end = await end_of(client, chat(text("a"), structured_outputs={kind: content}, max_tokens=64, seed=1))
            seen.answers[end if end == "200" else f"{end}: {content}"] += 1


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Let other work go on meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def lines(mode: str, model: Path, only: Sequence[str], seconds: float) -> AsyncIterator[Line]:
    """Start a server in a mode, and run everything that was chosen."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, contextlib.ExitStack() as stack:
        server = running("semel", model, Path(home), "http://127.0.0.1:9", flags=("--max-num-seqs", "64", *MODES[mode]))
        target = await asyncio.to_thread(stack.enter_context, server)
        async with victim(target, Seen()):
            await asyncio.sleep(ALONE_S)  # the first requests wait for what is loaded with them
        for name, tenant, loops in HARMLESS:
            if not only or any(part in name for part in only):
                with busy_loops(loops):
                    yield await watch(target, mode, name, partial(send_ordinary, target, tenant), None)
        for form in FORMS:
            if not only or any(part in form.name for part in only):
                yield await watch(target, mode, form.name, partial(attack, target, mode, form, seconds), form)


def lengthen(model: Path) -> None:
    """Let the vocabulary's last token be the long one."""
    file = model / "tokenizer.json"
    content: dict[str, Any] = json.loads(file.read_text())
    bpe = content["model"]
    special = min(token["id"] for token in content["added_tokens"])
    last = next(token for token, number in bpe["vocab"].items() if number == special - 1)
    bpe["vocab"][LONG_TOKEN] = bpe["vocab"].pop(last)
    bpe["merges"] = [merge for merge in bpe["merges"] if "".join(merge) != last]
    file.write_text(json.dumps(content))


def tell(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


async def main(arguments: argparse.Namespace) -> int:
    """Run what was chosen; 1 if a limit was missed."""
    failed, running_task = False, asyncio.current_task()
    assert running_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running_task.cancel)  # so that its servers end too
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIMS), "src"])
    os.environ["SEMEL_SHIM_ASYNC"] = "1"  # vLLM's CPU platform would switch it off
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen2-vl", Path(folder) / "model")
        lengthen(model)
        tell(*COLUMNS)
        tell(*("---" for _ in COLUMNS))
        for mode in arguments.modes:
            async for line in lines(mode, model, arguments.only, arguments.seconds):
                tell(*line.cells())
                failed |= bool(line.faults())
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modes", nargs="*", default=[*MODES], choices=[*MODES])
    parser.add_argument("--only", nargs="*", default=[], help="Parts of the names of forms.")
    parser.add_argument("--seconds", type=float, default=12.0, help="How long each form lasts.")
    sys.exit(asyncio.run(main(parser.parse_args())))
