"""New weights in a running worker, as a trainer gives them: over its admin address, with requests in flight.

One `semel serve` for the whole file, whose vLLM takes weights from a folder, by a reload or by a transfer engine of the
lab: on a CPU none of vLLM's own runs, and sleep frees nothing. It has a host tier and a store for encoder outputs, and
a hang deadline of a few seconds. Every night the answers are also compared with those of a fresh engine.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.conftest import Folder
from tests.embeddings.redis import running_redis
from tests.engine.parity import draw_image
from tests.serve.served import Served, image_url, serving, sum_of, until
from tests.test_examples import run_example

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

IMAGES: Final = 20
REQUESTS: Final = 100
AT_ONCE: Final = 8
SEQUENCES: Final = 16
WAITING: Final = 64
LONG: Final = 160
"""Tokens, so many that a pause comes before the 64th request ends."""

ANSWER_S: Final = 240.0
"""The last of 64 long answers takes a minute where little of two cores is left."""

HANG_S: Final = 3.0
PAUSE_S: Final = 8.0
"""Longer than the deadline for a step, which is four times the longest step if that is more."""

LONG_PAUSE_S: Final = 120.0

Answer = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A chat: some of the images, in some order, and a word."""

    images: tuple[int, ...]
    word: str


@dataclass
class Trained:
    """A server whose worker gets new weights, and what it has answered with each."""

    served: Served
    admin: httpx.Client
    first: Path
    second: Path
    """Folders with the weights at start, and others."""

    images: list[dict[str, Any]]
    threads: ThreadPoolExecutor
    questions: list[Question]
    fresh: list[Answer] = field(default_factory=list)
    """The answers with the weights at start, before anything happened."""

    def ask(self, question: Question, **fields: Any) -> httpx.Response:
        content = [*(self.images[number] for number in question.images), {"type": "text", "text": question.word}]
        return self.served.chat(content, within_s=ANSWER_S, return_token_ids=True, ignore_eos=True, **fields)

    def answers(self, questions: Sequence[Question] | None = None) -> list[Answer]:
        """Ask, a few at a time."""
        asked = self.questions if questions is None else questions
        return [tokens_of(response) for response in self.threads.map(self.ask, asked)]

    def post(self, path: str, body: Any = None, within_s: float = 60.0) -> dict[str, Any]:
        response = self.admin.post(path, json=body, timeout=within_s)
        assert response.status_code == 200, response.text
        return response.json() if response.content else {}

    def load(self, folder: Path, version: str) -> None:
        """Have the worker take the weights of a folder."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self.post("/update_weight_version", {"new_version": version})

    def worker(self, name: str, labels: str = "") -> float:
        """A metric of the worker."""
        return sum_of(self.admin.get("/metrics", timeout=5).text, name, labels)

    def preprocessed(self) -> float:
        return self.served.metric("semel_pool_processed_total")

    def encoded(self) -> float:
        """Encoder outputs that were made: neither found nor loaded."""
        return self.worker("semel_encoder_planned_total") - self.worker("semel_embedding_loads_total")

    def store_calls(self) -> float:
        return self.worker("semel_embedding_store_calls_total")

    def begin(self, count: int, **fields: Any) -> list[Future[httpx.Response]]:
        """Ask the same question so often. The worker has all of these requests then, and none has ended."""
        self.post("/pause?mode=keep")
        asking = [self.threads.submit(self.ask, self.questions[0], **fields) for _ in range(count)]
        until(lambda: self.served.running() >= count, 60)
        self.post("/resume")
        return asking


def tokens_of(response: httpx.Response) -> Answer:
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


def reason_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["finish_reason"])


def train(folder: Path, target: Path) -> Path:
    """Write the same model with other weights, all of them, the encoder's included."""
    shutil.copytree(folder, target)
    rng = np.random.default_rng(7)
    for path in target.glob("*.safetensors"):
        changed = {
            name: (tensor * (1 + 0.3 * rng.standard_normal(tensor.shape))).astype(tensor.dtype)
            for name, tensor in load_file(path).items()
        }
        save_file(changed, path, metadata={"format": "pt"})
    return target


def draw_questions() -> list[Question]:
    """Each image at least once."""
    rng = random.Random(3)
    drawn = [Question((number,), f"image {number}") for number in range(IMAGES)]
    while len(drawn) < REQUESTS:
        chosen = tuple(rng.choices(range(IMAGES), k=rng.randint(1, 3)))
        drawn.append(Question(chosen, rng.choice(["What is this?", "Compare.", "And now?"])))
    rng.shuffle(drawn)
    return drawn


@contextmanager
def started(folder: Path, second: Path, home: Path, *flags: str) -> Iterator[Trained]:
    """`semel serve` in vLLM's dev mode, with an admin key."""
    key, port = home / "admin.key", free_port()
    create_key(key)
    admin = ("--admin-port", str(port), "--admin-key-file", str(key), "--max-num-seqs", str(SEQUENCES))
    rng = np.random.default_rng(11)
    images = [image_url(draw_image(rng, side=112)) for _ in range(IMAGES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_SERVER_DEV_MODE", "1")
        with (
            serving(folder, home, *admin, *flags, within_s=600) as served,
            ThreadPoolExecutor(AT_ONCE) as threads,
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key.read_text().strip()}"}
            ) as client,
        ):
            yield Trained(served, client, folder, second, images, threads, draw_questions())


@pytest.fixture(scope="module")
def trained(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    home = tmp_path_factory.mktemp("rl")
    first = tiny("qwen2-vl")
    with running_redis(home, is_unix=True) as redis:
        flags = (
            *("--embedding-tier-gb", "0.1", "--embedding-staging-mb", "16", "--embedding-store", redis.url),
            *("--embedding-publish-min-requests", "1", "--embedding-fetch-ms", "1000"),
            *("--encoder-cache-embeddings", "8192", "--engine-progress-s", str(HANG_S)),
            *("--worker-cls", "semel.lab.testing.weight_transfer.FolderWorker"),
            *("--weight-transfer-config", '{"backend": "folder"}'),
        )
        with started(first, train(first, home / "second"), home, *flags) as made:
            until(lambda: made.worker("semel_embedding_store_up") == 1, 60)
            # The first answer with log probabilities has vLLM compile a function, which may take more than HANG_S.
            tokens_of(made.ask(made.questions[0], logprobs=True, max_tokens=1))
            made.fresh = made.answers()
            until(lambda: made.worker("semel_embedding_published_total") >= IMAGES, 60)
            yield made


@contextmanager
def many(trained: Trained) -> Iterator[None]:
    """Enough threads for all who wait."""
    few, trained.threads = trained.threads, ThreadPoolExecutor(WAITING + 1)
    try:
        with trained.threads:
            yield
    finally:
        trained.threads = few


def test_new_weights_are_used_for_everything_and_nothing_is_preprocessed_again_B8(trained: Trained) -> None:
    """The control for old entries: with all caches emptied the same weights give the same answers."""
    checksums = trained.post("/weight_checker", {"action": "checksum"})["checksums"]
    before = trained.preprocessed(), trained.encoded()
    trained.load(trained.second, "step-1")
    calls = trained.store_calls()
    found = trained.answers()
    changed = sum(one != other for one, other in zip(found, trained.fresh, strict=True))
    assert changed > REQUESTS // 2, "these weights say other things"
    assert trained.preprocessed() - before[0] == 0
    assert trained.encoded() - before[1] == IMAGES, "each once"
    assert trained.answers() == found
    assert trained.encoded() - before[1] == IMAGES
    assert trained.worker("semel_embedding_store_up") == 0
    assert trained.store_calls() == calls, "the store is neither read nor written any more"
    compared = trained.post("/weight_checker", {"action": "compare", "baseline": checksums})
    assert not compared["match"]
    trained.post("/v1/mm_cache/reset")
    assert trained.answers() == found
    trained.load(trained.first, "step-2")
    assert trained.answers() == trained.fresh, "as a fresh engine with these weights answers"
    assert trained.post("/weight_checker", {"action": "compare", "baseline": checksums}) == {
        "match": True,
        "mismatches": [],
    }


def test_requests_in_flight_are_answered_while_weights_change_and_later_ones_with_the_new(trained: Trained) -> None:
    during = [trained.threads.submit(trained.ask, question) for question in trained.questions]
    until(lambda: sum(one.done() for one in during) >= AT_ONCE, 60)
    trained.load(trained.second, "step-3")
    second = trained.answers(trained.questions[:AT_ONCE])
    assert {reason_of(one.result(ANSWER_S)) for one in during} == {"length"}
    trained.post("/v1/mm_cache/reset")
    assert trained.answers(trained.questions[:AT_ONCE]) == second
    trained.load(trained.first, "step-4")
    assert trained.answers() == trained.fresh


def test_answers_name_the_weights_that_sampled_them(trained: Trained) -> None:
    trained.post("/update_weight_version", {"new_version": "named"})
    assert trained.admin.get("/weight_info").json() == {"weight_version": "named"}
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    answered = httpx.post(f"{trained.served.url}/inference/v1/generate", json=body, timeout=60)
    assert answered.status_code == 200, answered.text
    assert answered.json()["choices"][0]["weight_versions"] == [{"version": "named", "start": 0, "end": 4}]


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_longer_than_the_hang_deadline_with_64_requests_fails_none_S22(trained: Trained, mode: str) -> None:
    pause_with_64(trained, mode, PAUSE_S)


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_of_120_s_with_64_requests_fails_none_S22(trained: Trained, mode: str) -> None:
    pause_with_64(trained, mode, LONG_PAUSE_S)


def pause_with_64(trained: Trained, mode: str, pause_s: float) -> None:
    with many(trained):
        asking = trained.begin(WAITING, max_tokens=LONG)
        trained.post(f"/pause?mode={mode}")
        assert trained.admin.get("/is_paused").json() == {"is_paused": True}
        done = sum(one.done() for one in asking)
        assert done < WAITING, "some wait"
        assert trained.worker("semel_engine_paused") == 1
        time.sleep(pause_s)
        assert sum(one.done() for one in asking) - done <= SEQUENCES, "answers that were on their way"
        still = [one for one in asking if not one.done()]
        time.sleep(0.5)
        assert not any(one.done() for one in still)
        trained.post("/resume")
        answers = {tokens_of(one.result(ANSWER_S)) for one in asking}
    assert len(answers) == 1, "all asked the same"
    assert "engine_hung" not in trained.served.log.read_text()
    assert trained.worker("semel_engine_paused") == 0


def test_requests_that_wait_through_an_update_find_no_prefix_of_before(trained: Trained) -> None:
    """Those that had begun go on with what they have; the others are answered as if they came later."""
    wide = Question((0, 1, 2, 3, 4, 5), "the same for all")
    trained.questions.insert(0, wide)
    try:
        with many(trained):
            asking = trained.begin(WAITING, max_tokens=LONG)
            trained.post("/pause?mode=keep")
            trained.load(trained.second, "kept")
            assert trained.admin.get("/is_paused").json() == {"is_paused": True}
            trained.post("/resume")
            answers = [tokens_of(one.result(ANSWER_S)) for one in asking]
        trained.post("/v1/mm_cache/reset")
        expected = tokens_of(trained.ask(wide, max_tokens=LONG))
    finally:
        trained.questions.pop(0)
        trained.load(trained.first, "back")
    assert sum(answer == expected for answer in answers) >= WAITING - 2 * SEQUENCES
    assert trained.answers() == trained.fresh


def test_an_abort_ends_all_64_at_once_and_later_ones_wait(trained: Trained) -> None:
    with many(trained):
        asking = trained.begin(WAITING, max_tokens=2 * LONG)
        trained.post("/pause")
        reasons = [reason_of(one.result(20)) for one in asking]
        assert set(reasons) == {"abort"}
        later = trained.threads.submit(trained.ask, trained.questions[0])
        time.sleep(1)
        assert not later.done()
        trained.post("/resume")
        assert tokens_of(later.result(60)) == trained.fresh[0]


def test_a_sleep_is_told_and_ends_and_answers_are_the_same(trained: Trained) -> None:
    """On a CPU it frees nothing, but all of it is said and done."""
    trained.post("/sleep?level=1")
    assert trained.admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert trained.worker("semel_engine_paused") == 1
    assert trained.post("/wake_up") == {"status": "awake", "tags": None}
    assert trained.admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert trained.answers() == trained.fresh


def test_weights_come_by_vllms_protocol_of_transfer_too(trained: Trained) -> None:
    """With requests under way, and nobody who pauses: the engine is held from the first call to the last."""
    trained.load(trained.second, "reference")
    expected = trained.answers()
    trained.load(trained.first, "back")
    trained.post("/init_weight_transfer_engine", {"init_info": {}})
    during = [trained.threads.submit(trained.ask, question) for question in trained.questions]
    until(lambda: sum(one.done() for one in during) >= AT_ONCE, 60)
    trained.post("/start_weight_update")
    assert trained.admin.post("/resume", timeout=20).status_code == 400
    trained.post("/update_weights", {"update_info": {"folder": str(trained.second)}})
    assert trained.admin.get("/is_paused").json() == {"is_paused": True}
    trained.post("/finish_weight_update", {"weight_version": "transferred"})
    assert trained.admin.get("/weight_info").json() == {"weight_version": "transferred"}
    assert {reason_of(one.result(ANSWER_S)) for one in during} == {"length"}
    assert trained.answers() == expected
    trained.load(trained.first, "back")
    assert trained.answers() == trained.fresh


def test_a_call_that_the_engine_refuses_harms_nothing(trained: Trained) -> None:
    bad = {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}
    assert trained.admin.post("/collective_rpc", json=bad, timeout=20).status_code == 400
    assert trained.admin.get("/is_paused").json() == {"is_paused": False}
    assert trained.admin.post("/finish_weight_update", timeout=20).status_code == 400
    assert trained.admin.get("/is_paused").json() == {"is_paused": False}
    empty = {"method": "reload_weights", "kwargs": {"weights_path": str(trained.served.home)}}
    refused = trained.admin.post("/collective_rpc", json=empty, timeout=20)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "engine_failed")
    assert trained.admin.get("/is_paused").json() == {"is_paused": True}, "its layers have no weights"
    trained.load(trained.first, "again")
    assert trained.admin.get("/is_paused").json() == {"is_paused": False}
    assert trained.answers() == trained.fresh


@pytest.mark.nightly
def test_answers_after_an_update_are_those_of_a_fresh_engine_B8(
    trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trained.load(trained.second, "fresh")
    found = trained.answers()
    trained.load(trained.first, "back")
    home = tmp_path_factory.mktemp("fresh")
    with started(trained.second, trained.second, home) as fresh:
        assert fresh.answers() == found


def test_a_policy_learns_and_its_images_are_preprocessed_once(trained: Trained, tmp_path: Path) -> None:
    """`examples/train_policy.py`, on images of its own."""
    rng = np.random.default_rng(12)
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(draw_image(rng, side=112))
    urls = ["--url", trained.served.url, "--admin", str(trained.admin.base_url)]
    key = ["--admin-key-file", trained.served.home / "admin.key"]
    printed = run_example("train_policy.py", trained.first, tmp_path, *urls, *key, within_s=ANSWER_S).splitlines()
    steps = [re.findall(r"\d[\d.e-]*", line.partition(": ")[2]) for line in printed]
    rewards, differences, made = ([float(step[place]) for step in steps] for place in range(3))
    trained.load(trained.first, "back")
    assert made == [3] * 8
    assert max(differences) < 0.01, "the worker has the trainer's weights, in each step"
    assert rewards[-1] > rewards[0] + 0.1, rewards
    assert trained.answers() == trained.fresh
