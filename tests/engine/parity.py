"""What vLLM answers by itself, what it answers through semel, and the comparison of the two."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from semel.compose import compose_pipeline
from semel.core import Digest, Key, Media, Output, Submission
from semel.engine.vllm.compat.internals import LAZY_TRANSFER_WORKER
from semel.engine.vllm.engine import VllmEngine
from semel.processing.processor import ProcessorKind
from semel.render import ChatRequest, Pipeline, Rendered

GREEDY: Mapping[str, object] = {"temperature": 0.0, "max_tokens": 12, "logprobs": 3, "ignore_eos": True}
WORDS = ("what", "is", "in", "this", "picture", "tell", "me", "more", "about", "red", "?", ",", "12", "été", "你好")


Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class Clip:
    """A recording, and the tokens that begin its transcript."""

    data: bytes
    start: str


Question = Chat | Clip


@dataclass(frozen=True)
class Answer:
    """What an engine made of a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]


@dataclass(frozen=True)
class Rig:
    """An engine, and the pipeline that renders for it."""

    engine: VllmEngine
    pipeline: Pipeline
    folder: Path

    def through(self, processor: ProcessorKind) -> Rig:
        """The same engine, and features of a processor that is named."""
        target = self.engine.contract.target
        return replace(self, pipeline=compose_pipeline(self.folder, target, Key(bytes(32)), processor=processor))

    @property
    def llm(self) -> Any:
        return self.engine._llm

    async def bare(self, question: Question) -> Answer:
        """vLLM's own rendering and answer."""
        if isinstance(question, Clip):
            return await self.bare_prompt(bare_transcription(question))
        from vllm.renderers.params import ChatParams

        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        _, (prompt,) = await self.llm.renderer.render_chat_async([question], params)
        return await self.bare_prompt(prompt)

    async def bare_prompt(self, prompt: Any) -> Answer:
        from vllm.sampling_params import SamplingParams

        async for result in self.llm.generate(prompt, SamplingParams(**GREEDY), request_id="bare"):
            last = result.outputs[0]
        steps = tuple({token: entry.logprob for token, entry in step.items()} for step in last.logprobs)
        return Answer(tuple(last.token_ids), steps)

    async def render(self, question: Question) -> Rendered:
        """semel's rendering."""
        if isinstance(question, Clip):
            draft = self.pipeline.read_transcription(Media("audio", question.data), question.start)
            return await self.pipeline.render(draft)
        return await self.pipeline.chat(ChatRequest(question))

    async def ours(self, question: Question) -> Answer:
        """What is answered through semel."""
        return await self.answer(await self.render(question))

    async def answer(self, rendered: Rendered) -> Answer:
        """What the engine makes of a rendering."""
        stream = await self.engine.submit(submission(rendered))
        return joined([output async for output in stream])


def submission(rendered: Rendered, **sampling: object) -> Submission:
    return Submission("ours", rendered.prompt, rendered.features, {**GREEDY, **sampling})


def nothing_due(*_: object) -> Generator[None, None, list[Digest]]:
    """In the place of `ItemDelivery.due`: every item goes with its request, as in vLLM."""
    yield
    return []


def joined(outputs: list[Output]) -> Answer:
    assert outputs[-1].finish_reason == "length"
    tokens = tuple(token for output in outputs for token in output.token_ids)
    return Answer(tokens, tuple(step for output in outputs for step in output.logprobs or ()))


@asynccontextmanager
async def running(folder: Path, **engine_args: Any) -> AsyncIterator[Rig]:
    """A real engine on a tiny model, closed at the end whatever happens."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    common = {"enforce_eager": True, "dtype": "float32", "seed": 0, "disable_log_stats": True}
    arguments = {**common, "worker_cls": LAZY_TRANSFER_WORKER, **engine_args}
    engine = VllmEngine.start(AsyncEngineArgs(model=str(folder), **arguments))
    try:
        yield Rig(engine, compose_pipeline(folder, engine.contract.target, Key(bytes(32))), folder)
    finally:
        await engine.close()


async def compare(rig: Rig, chats: Sequence[Question]) -> list[Answer]:
    """Every question on both sides, with all caches empty at the start of each side; the answers, if identical."""
    await rig.engine.reset()
    expected = [await rig.bare(chat) for chat in chats]
    await rig.engine.reset()
    answers = [await rig.ours(chat) for chat in chats]
    for index, (ours, bare) in enumerate(zip(answers, expected, strict=True)):
        assert ours == bare, f"chat {index} differs"
    return answers


def bare_transcription(clip: Clip) -> Any:
    """From samples that vLLM's own loader reads."""
    from vllm.inputs import ExplicitEncoderDecoderPrompt, TextPrompt
    from vllm.multimodal.media.audio import load_audio

    samples, rate = load_audio(io.BytesIO(clip.data), sr=None)
    encoder = TextPrompt(prompt="", multi_modal_data={"audio": (samples, rate)})
    return ExplicitEncoderDecoderPrompt(encoder_prompt=encoder, decoder_prompt=TextPrompt(prompt=clip.start))


def distinct(answers: list[Answer]) -> float:
    return len({answer.token_ids for answer in answers}) / len(answers)


def draw_image(rng: np.random.Generator, *, side: int | None = None) -> bytes:
    """A PNG or JPEG of random blocks."""
    width, height = (side, side) if side else (int(n) for n in rng.integers(30, 300, 2))
    blocks = rng.integers(0, 256, (height // 14 + 1, width // 14 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, "PNG" if side or rng.random() < 0.5 else "JPEG")
    return buffer.getvalue()


def clip(rng: np.random.Generator) -> bytes:
    """A WAV of random tones, 0.3 to 5 s at 16 kHz."""
    time = np.arange(int(rng.uniform(0.3, 5.0) * 16_000)) / 16_000
    tones = np.sin(2 * np.pi * rng.uniform(80, 4_000, (4, 1)) * time).sum(axis=0)
    noise = rng.normal(0, 0.3, time.size)
    samples = ((tones + noise) / 6 * 32_767).clip(-32_768, 32_767).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, samples.size, "NONE", ""))
        file.writeframes(samples.tobytes())
    return buffer.getvalue()


def video(
    rng: np.random.Generator, codec: str = "libx264", container: str = "mp4", *, seconds: float | None = None
) -> bytes:
    """Blocks that change from frame to frame, 1 to 5 s of them."""
    import av

    length_s = float(rng.uniform(1.0, 5.0)) if seconds is None else seconds
    width, height = (28 * int(n) for n in rng.integers(2, 7, 2))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=int(rng.integers(5, 31)))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(int(length_s * float(stream.average_rate or 1))):
            blocks = rng.integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(blocks.repeat(14, axis=0).repeat(14, axis=1), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/png")}}


def audio_part(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def words(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(1, 12))))


def random_chat(rng: np.random.Generator, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One to three turns of a user with answers between them; the items anywhere among the user's texts."""
    turns = int(rng.integers(1, 4))
    homes = rng.integers(0, turns, len(items))
    chat: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        chat.append({"role": "system", "content": words(rng)})
    for turn in range(turns):
        parts = [item for item, home in zip(items, homes, strict=True) if home == turn]
        parts.insert(int(rng.integers(0, len(parts) + 1)), {"type": "text", "text": words(rng)})
        chat.append({"role": "user", "content": parts if len(parts) > 1 else parts[0]["text"]})
        if turn < turns - 1:
            chat.append({"role": "assistant", "content": words(rng)})
    return chat
