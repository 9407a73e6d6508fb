"""The corpus holds, the oracles can fail, and the harness finds what is planted (S5 to S10, S13 to S15)."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from semel.errors import MediaUndecodable, SemelError, ServiceError
from semel.media.fetch.url import WebUrl, parse_url
from semel.render import ChatRenderer, Conversation
from tools.fuzz import chat, pdf, pdf_pool, planted, safetensors_file, url, wire
from tools.fuzz.oracle import Finding, bounded
from tools.fuzz.running import Outcome, fuzz
from tools.fuzz.target import CORPUS, Target, TooSlow, timed
from tools.fuzz.targets import TARGETS, find

MAX_FILES = 220
MAX_BYTES = 300_000

each_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, id=target.name, marks=[pytest.mark.slow] if target.starts_processes else [])
        for target in TARGETS
    ],
)


@each_target
def test_every_input_that_the_repository_has_is_read_or_refused(target: Target) -> None:
    run = target.run()
    inputs = target.inputs()
    assert inputs
    for path in inputs:
        try:
            run(path.read_bytes())
        except Exception as error:
            raise AssertionError(f"scripts/fuzz {target.name} --repeat {path}") from error


@each_target
def test_the_corpus_has_every_seed_and_no_seed_is_a_finding(target: Target) -> None:
    run = target.run()
    for seed in target.seeds().values():
        assert len(seed) <= target.max_bytes
        run(seed)
    missing = target.seeds().keys() - {path.name for path in target.inputs()}
    assert not missing, "write them with scripts/fuzz --seeds"


def test_the_corpus_is_small_and_every_folder_of_it_has_a_target() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) <= MAX_FILES
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.name for path in CORPUS.iterdir()} == {target.corpus.name for target in TARGETS}


@each_target
def test_an_edited_input_is_still_one_that_a_target_takes(target: Target) -> None:
    mutate = target.mutate()
    if mutate is None:
        return
    random = Random(target.name)
    edits = [mutate(data, random) for data in target.seeds().values() for _ in range(20)]
    assert len({edit for edit in edits if edit is not None}) > len(edits) // 2


# The oracles: each is held against the naive implementation that it is there to catch.


def test_an_allocation_over_the_bound_is_a_finding_S10() -> None:
    with pytest.raises(Finding, match="bytes were allocated"), bounded(1_000):
        bytearray(10_000)


@pytest.mark.slow
def test_an_input_that_takes_too_much_processor_time_is_a_finding_and_an_interruption_is_not() -> None:
    header = find("planted-header")
    header.run()(b"max-age= 60 s")
    with pytest.raises(TooSlow, match="8,012 bytes"):
        header.run()(b"max-age=" + b" " * 8_000 + b"60 s")
    runs = iter([0.2, 0.0, 0.0])
    timed(lambda _: _spend(next(runs)), lambda _: 0.1)(b"once")
    with pytest.raises(TooSlow, match="4 bytes"):
        timed(lambda _: _spend(0.02), lambda _: 0.01)(b"ever")


def test_the_naive_image_decoder_is_a_finding_S5() -> None:
    with pytest.raises(Finding, match="is not upright"):
        planted.run_image(planted.seeds()["jpeg"])


def test_a_renderer_that_does_not_guard_text_is_a_finding_S14() -> None:
    class Naive(ChatRenderer):
        """Tokenises whatever the template shows."""

        def tokenize(self, conversation: Conversation, **_: Any) -> list[int]:
            return self.tokenizer.encode("".join(conversation.strings()))

    _, ours = chat.renderers()
    careless = replace(ours, insertion=lambda *_: "")  # the template shows no item
    naive = Naive(careless.template, careless.tokenizer, careless.placeholders, careless.insertion)
    image = json.loads(chat.seeds()["image"])["messages"][0]["content"][0]
    body = {"messages": [{"role": "user", "content": ["<|image_pad|>", image]}]}
    chat.check(body, careless)
    with pytest.raises(Finding, match="S14"):
        chat.check(body, naive)


def test_a_url_that_parsers_read_differently_is_a_finding_S2() -> None:
    text = "https://example.com:443@127.0.0.1/"
    naive_host = text.removeprefix("https://").partition(":")[0]
    read = parse_url("https://example.com/")
    assert isinstance(read, WebUrl)
    assert read.host == naive_host
    with pytest.raises(Finding, match="others read"):
        url.check_parsers(text, read)


def test_the_seeds_reach_what_they_are_for() -> None:
    """A corpus that is refused at the first check would pass every test above."""
    from semel.interchange.safetensors import FeatureEntry, read

    assert [type(entry) for entry in read(memoryview(safetensors_file.seeds()["features-2"]))] == [
        FeatureEntry,
        FeatureEntry,
    ]
    conversation = Conversation.parse(json.loads(chat.seeds()["image"])["messages"])
    renderer, _ = chat.renderers()
    assert renderer.tokenize(conversation).count(renderer.tokenizer.token_id("<|image_pad|>") or 0) == 1
    assert wire.opens(wire.seeds()["worker-all"])
    assert wire.opens(wire.seeds()["frontend-all"])


def _spend(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


# The harness.


def _fuzz(target: Target, folder: Path, *, seconds: int, runs: int = -1) -> Outcome:
    corpus = folder / "corpus"
    corpus.mkdir()
    for name, seed in target.seeds().items():
        (corpus / name).write_bytes(seed)
    for path in target.inputs():
        shutil.copy(path, corpus)
    # A seed: whether a change is at fault must not depend on luck. `scripts/fuzz` has another one each time.
    return fuzz(target, corpus=corpus, findings=folder / "findings", seconds=seconds, runs=runs, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_harness_finds_a_planted_bug_that_blind_search_does_not(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    random = Random(0)
    for _ in range(50_000):
        planted.run_codec(random.randbytes(random.randint(0, 64)))
    # By runs and not by time: a busy machine tries the same inputs.
    found = _fuzz(find("planted-codec"), tmp_path, seconds=600, runs=1_000_000)
    assert found.error is not None
    assert "IndexError" in found.error
    (finding,) = found.findings
    with pytest.raises(IndexError):
        planted.run_codec(finding.read_bytes())


@pytest.mark.slow
@each_target
def test_a_short_run_of_the_fuzzer_finds_nothing(target: Target, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    outcome = _fuzz(target, tmp_path, seconds=2)
    assert outcome.error is None, outcome.log[-4_000:]
    assert outcome.executions > len(target.inputs())
    assert outcome.coverage > 10, "nothing guides the fuzzer: what does the target instrument?"


def test_a_page_of_another_size_than_its_header_says_is_found_S5(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is what is checked before it is drawn."""
    monkeypatch.setattr(pdf, "image_size", lambda *_: (9, 9))
    with pytest.raises(Finding, match="and not of"):
        pdf.run(pdf.seeds()["plain"])


@pytest.mark.parametrize(
    ("error", "words"),
    [(ServiceError("the process died"), "S6"), (MediaUndecodable("bad object at 7"), "foreign text")],
    ids=["a process that died", "foreign text"],
)
def test_what_a_pool_process_answers_is_the_clients_fault_and_in_our_words_S6_S7(
    error: SemelError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        """Fails whatever it is asked."""

        async def count_pages(self, _: object) -> int:
            raise error

    with asyncio.Runner() as runner:
        monkeypatch.setattr(pdf_pool, "_started", lambda: (runner, Broken()))
        with pytest.raises(Finding, match=words):
            pdf_pool.run(b"")
        error = MediaUndecodable("the document has no pages")
        pdf_pool.run(b"")
