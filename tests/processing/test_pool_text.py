"""Models whose `tokenizer.json` is missing or says something else: their texts become tokens in the pool."""

from __future__ import annotations

import asyncio
import json
import shutil
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from semel.compose.pipeline import blocking, compose_pipeline, tokenizer_calls, tokenizer_of
from semel.core import Key, Rendering, Target
from semel.errors import ConfigError, InvalidRequest, ProtocolError
from semel.lab.testing.models import FAMILIES
from semel.processing import Pool
from semel.processing.pool.pipe import Description, Detokenize, Text, Tokenize, Tokens
from semel.processing.pool.text import TokenizeJob, text_answer
from semel.processing.vocabulary import EngineTokenizer, Vocabulary, to_vocabulary
from semel.render import ChatRequest, Tokenizer
from semel.render.tokens.remote_tokenizer import Decode, Encode, RemoteTokenizer
from semel.telemetry.request_context import RequestContext, entered, entered_as
from tests.processing.scripted_pool import Peer, scripted_pool
from tests.waiting import until

Folder = Callable[[str], Path]

TARGET = Target("float32")
QUICK = ("gemma3", "qwen2-vl", "whisper")
TEXT = "Audio 1: someone knocks – naïve 🙂 <|im_start|>user\n<|image_pad|>, 12 <|im_end|>"


class Letters:
    """A tokenizer of transformers' kind: one token for each letter, and two that are spelled out."""

    added: ClassVar = {"<a>": 300, "<b>": 301}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [300] if add_special_tokens else []
        while text:
            spelled = next((token for token in self.added if text.startswith(token)), text[0])
            ids.append(self.added[spelled] if spelled in self.added else ord(spelled) % 300)
            text = text[len(spelled) :]
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        names = {number: name for name, number in self.added.items()}
        shown = (token for token in token_ids if not (skip_special_tokens and token in names))
        return "".join(names.get(token, chr(token)) for token in shown)

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [self.decode(row) for row in rows]

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(300)} | self.added

    def get_added_vocab(self) -> dict[str, int]:
        return self.added

    def __len__(self) -> int:
        return 302


def without_file(source: Path, folder: Path) -> Path:
    """The same model, whose tokenizer is in the older files: `vocab.json` and `merges.txt`."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer.json"))
    model = json.loads((source / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in model["added_tokens"]}
    vocabulary = {token: number for token, number in model["model"]["vocab"].items() if token not in added}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "\n".join(" ".join(pair) for pair in model["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    path = folder / "tokenizer_config.json"
    special = {str(number): {"content": text, "special": True} for text, number in added.items()}
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": special}))
    return folder


# What becomes tokens where.


@pytest.mark.parametrize(
    "family",
    [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in sorted(FAMILIES)],
)
def test_the_file_of_every_tested_family_gives_the_engine_s_tokens(tiny: Folder, family: str) -> None:
    from transformers import AutoTokenizer

    folder = tiny(family)
    assert to_vocabulary(AutoTokenizer.from_pretrained(folder), folder) is None


def test_a_file_that_gives_other_tokens_or_none_is_not_used(tiny: Folder, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny("qwen2-vl")
    raw = AutoTokenizer.from_pretrained(folder)
    assert to_vocabulary(raw, tmp_path) is not None  # no file
    file = json.loads((folder / "tokenizer.json").read_text())
    for change in ({"normalizer": {"type": "Lowercase"}}, {"added_tokens": file["added_tokens"][:-1]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**file, **change}))
        found = to_vocabulary(raw, tmp_path)
        assert found is not None
        assert len(found.texts) == len(raw)
        assert found.added["<|image_pad|>"] == raw.convert_tokens_to_ids("<|image_pad|>")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert to_vocabulary(raw, tmp_path) is not None
    shutil.copy(folder / "tokenizer.json", tmp_path)
    assert to_vocabulary(raw, tmp_path) is None


async def test_texts_and_tokens_cross_the_pipe_unchanged() -> None:
    tokenizer = EngineTokenizer(Letters())
    texts = ["", "a<b>c", "ü\n"]
    for special in (False, True):
        job = TokenizeJob.of(3, texts, "", add_special_tokens=special)
        order = Tokenize(3, (0, 5, 3), special)
        answer, payload = text_answer(tokenizer, order, job.media.data)
        assert isinstance(answer, Tokens)
        expected = [Letters().encode(text, add_special_tokens=special) for text in texts]
        assert job.read(answer, memoryview(payload)) == expected
        with pytest.raises(ProtocolError):
            text_answer(tokenizer, order, job.media.data + b"x")
        with pytest.raises(ProtocolError, match="answered item 3"):
            job.read(replace_item(answer), memoryview(payload))
    answer, payload = text_answer(tokenizer, Detokenize(1, True), array("i", [300, 97, 252]).tobytes())
    assert payload.decode() == "aü"
    with pytest.raises(InvalidRequest, match="surrogate"):
        TokenizeJob.of(1, ["\ud800"], "", add_special_tokens=False)


def replace_item(answer: Tokens) -> Tokens:
    return Tokens(answer.item + 1, answer.texts, answer.tokens)


def test_a_remote_tokenizer_answers_as_a_local_one(tiny: Folder) -> None:
    from transformers import AutoTokenizer

    folder = tiny("qwen2-vl")
    engine = EngineTokenizer(AutoTokenizer.from_pretrained(folder))
    local, remote = Tokenizer.load(folder), RemoteTokenizer(engine.vocabulary(), engine.encode, engine.decode)
    assert local.is_local
    assert not remote.is_local
    for special in (False, True):
        assert remote.encode(TEXT, add_special_tokens=special) == local.encode(TEXT, add_special_tokens=special)
    assert remote.encode_apart(["a b", " c"]) == local.encode_apart(["a b", " c"])
    ids = local.encode(TEXT)
    for skip in (False, True):
        decoded = local.decode(ids, skip_special_tokens=skip)
        assert remote.decode(ids, skip_special_tokens=skip) == decoded
    assert [remote.decode([token]) for token in ids] == [local.decode([token]) for token in ids]
    assert (remote.vocab_size, remote.longest) == (local.vocab_size, local.longest)
    assert remote.token_id("<|image_pad|>") == local.token_id("<|image_pad|>")
    assert remote.token_id("<|none|>") is None
    assert engine.vocabulary(["the", "no token"]).added.get("the") == local.token_id("the")
    assert "no token" not in engine.vocabulary(["the", "no token"]).added
    assert str(remote) == str(local)


async def test_the_event_loop_does_not_wait_for_itself() -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    call = blocking(double)
    assert await asyncio.to_thread(call, 4) == 8
    with pytest.raises(AssertionError, match="must not wait"):
        call(4)


def calls_of_nobody(pool: Pool) -> tuple[Encode, Decode]:
    """The wrong implementation: texts are nobody's."""
    return blocking(pool.tokenize), blocking(pool.detokenize)


async def check_texts_wait_by_tenant(calls: Callable[[Pool], tuple[Encode, Decode]]) -> None:
    """While the only process is busy, a tenant's many texts wait, and a text of another's."""
    let_go, orders = asyncio.Event(), list[int]()

    async def serve(peer: Peer) -> None:
        while True:
            order, _ = await peer.receive()
            await let_go.wait()
            if isinstance(order, Detokenize):
                await peer.send(Text(order.item, 0))
                continue
            assert isinstance(order, Tokenize)
            orders.append(order.sizes[0])
            await peer.send(Tokens(order.item, 1, 0), 4)

    async def ask(tenant: str, text: str) -> None:
        with entered(RequestContext("r")), entered_as(tenant):
            await asyncio.to_thread(encode, [text], add_special_tokens=False)

    async with scripted_pool(serve) as pool:
        encode, decode = calls(pool)
        async with asyncio.TaskGroup() as asking:
            asking.create_task(ask("acme", "a"))
            await until(lambda: pool.busy == 1)
            for number in range(3):
                asking.create_task(ask("acme", "a"))
                await until(lambda waiting=number + 1: sum(pool.waiting.values()) == waiting)  # type: ignore[misc]
            asking.create_task(ask("umbra", "two"))
            await until(lambda: sum(pool.waiting.values()) == 4)
            waiting = dict(pool.waiting)
            let_go.set()
        with entered(RequestContext("r", tenant="umbra")):
            assert await asyncio.to_thread(decode, [1, 2], skip_special_tokens=False) == ""
    assert waiting == {"acme": 3, "umbra": 1}
    assert orders.index(3) <= 2, "it waits for a turn of the other, and not for all of its texts"


async def test_texts_wait_by_tenant_as_items_do_S21() -> None:
    await check_texts_wait_by_tenant(tokenizer_calls)


async def test_mutant_texts_of_nobody_wait_for_all_that_came_before_S21() -> None:
    with pytest.raises(AssertionError):
        await check_texts_wait_by_tenant(calls_of_nobody)


def test_a_model_that_transcribes_needs_the_file(tmp_path: Path) -> None:
    described = Description("f", {}, encoder_decoder=True, vocabulary=Vocabulary(("a",), 1))
    engine = EngineTokenizer(Letters())
    with pytest.raises(ConfigError, match="a model that transcribes needs one"):
        tokenizer_of(tmp_path, Rendering(), described, engine.encode, engine.decode)
    chats = tokenizer_of(tmp_path, Rendering(), replace(described, encoder_decoder=False), engine.encode, engine.decode)
    assert isinstance(chats, RemoteTokenizer)


# With real processes.


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_model_without_the_file_is_tokenised_in_the_pool_as_with_it(tiny: Folder, tmp_path: Path) -> None:
    folder = without_file(tiny("qwen2-vl"), tmp_path / "older")
    local = Tokenizer.load(tiny("qwen2-vl"))
    pool = await Pool.start(folder, TARGET, spares=0)
    try:
        described = pool.description
        assert described.vocabulary is not None
        tokenizer = tokenizer_of(folder, Rendering(), described, *tokenizer_calls(pool))
        ids = await asyncio.to_thread(tokenizer.encode, TEXT)
        assert ids == local.encode(TEXT)
        assert await asyncio.to_thread(tokenizer.decode, ids) == local.decode(ids)
        long = "The quick brown fox. " * 50_000
        assert await asyncio.to_thread(tokenizer.encode, long) == local.encode(long)
        assert (pool.processed, pool.failed) == (0, 0)
        with pytest.raises(InvalidRequest, match="surrogate"):
            await asyncio.to_thread(tokenizer.encode, "\ud800")
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_pipeline_without_the_file_renders_the_same_prompts(tiny: Folder, tmp_path: Path) -> None:
    source = tiny("qwen2-vl")
    folder = without_file(source, tmp_path / "older")
    request = ChatRequest([{"role": "user", "content": TEXT.replace("<|image_pad|>", "")}])

    async def prompt(place: Path) -> Any:
        pipeline = compose_pipeline(place, TARGET, Key(bytes(32)))
        return (await pipeline.render(await pipeline.read_chat(request))).prompt.token_ids

    assert await prompt(folder) == await prompt(source)


def test_the_fingerprint_covers_the_files_that_take_the_place_of_the_one(tiny: Folder, tmp_path: Path) -> None:
    from semel.processing import HfProcessor

    source = tiny("qwen2-vl")
    first, second = (without_file(source, tmp_path / name) for name in ("first", "second"))
    prints = [HfProcessor.load(place, TARGET).fingerprint for place in (first, second, source)]
    assert prints[0] == prints[1] != prints[2]
    merges = (second / "merges.txt").read_text().splitlines()
    (second / "merges.txt").write_text("\n".join([*merges[:-1], ""]))
    assert HfProcessor.load(second, TARGET).fingerprint != prints[0]
