"""What was said in a clip, in vLLM's shapes of OpenAI's: whole, with segments and their times, or as chunks. Pure.

`text` is answered as `json` is, since vLLM's server answers it so.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from semel.engine import Output
from semel.frontend.answers import Head
from semel.frontend.logprobs import Decode

__all__ = ["FRAMES_PER_S", "Marks", "Transcript", "segments"]

FRAMES_PER_S: Final = 100
"""Whisper's spectrograms have a frame every 10 ms."""

_STEP_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens that are no text: every token from the first time on is a time, and one ends it all."""

    first_time: int
    end: int | None


@dataclass(slots=True)
class Transcript:
    """The transcript of one clip, piece by piece as a stream or at the end as a whole."""

    head: Head
    seconds: float
    language: str
    prompt_tokens: int
    """Those of the decoder."""

    running_usage: bool = False
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[Mapping[int, float]] = field(default_factory=list)
    _completion_tokens: int = 0

    def add(self, output: Output) -> None:
        """Keep an output for the whole."""
        self._texts.append(output.text)
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs or ()

    def whole(self) -> Mapping[str, Any]:
        """The text and what it cost: the seconds of the clip, rounded up."""
        usage = {"type": "duration", "seconds": math.ceil(self.seconds)}
        return {"text": "".join(self._texts), "usage": usage}

    def verbose(self, marks: Marks, decode: Decode, temperature: float) -> Mapping[str, Any]:
        """The text by segments."""
        told = segments(self._token_ids, self._logprobs, marks, decode, temperature)
        separator = "" if self.language in ("ja", "zh") else " "
        text = separator.join(one["text"] for one in told)
        return {
            "duration": self.seconds,
            "language": self.language,
            "text": text,
            "segments": told,
            "words": None,
        }

    def chunks(self, output: Output) -> Iterator[Mapping[str, Any]]:
        """The chunk of a stream that an output becomes, unless it would say nothing."""
        self._completion_tokens += len(output.token_ids)
        if not output.text and output.finish_reason is None:
            return
        choice: dict[str, Any] = {"delta": {"content": output.text}}
        if output.finish_reason is not None:
            choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        chunk = {**self.head.of("transcription.chunk"), "choices": [choice]}
        yield {**chunk, "usage": self._usage()} if self.running_usage else chunk

    def closing(self) -> Mapping[str, Any]:
        """The chunk that closes a stream with what it cost."""
        return {**self.head.of("transcription.chunk"), "choices": [], "usage": self._usage()}

    def _usage(self) -> Mapping[str, int]:
        prompt = self.prompt_tokens + math.ceil(self.seconds * FRAMES_PER_S)
        total = prompt + self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self._completion_tokens, "total_tokens": total}


def segments(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float]],
    marks: Marks,
    decode: Decode,
    temperature: float,
) -> list[dict[str, Any]]:
    """What stands between times: a segment ends where two of them follow each other."""
    marked = [marks.first_time, *token_ids]
    if marked[-1] == marks.end:
        marked.pop()
    if len(marked) > 1 and marked[-2] < marks.first_time <= marked[-1]:
        marked.append(marked[-1])  # the last time ends its segment, though none begins after it
    told: list[dict[str, Any]] = []
    begin, sum_of_logprobs = 0, 0.0
    for place in range(1, len(marked)):
        if min(marked[place - 1], marked[place]) < marks.first_time:
            sum_of_logprobs += logprobs[place - 1][marked[place]]
            continue
        tokens = marked[begin + 1 : place - 1]
        text = decode(tokens)
        told.append(
            {
                "id": len(told),
                "avg_logprob": sum_of_logprobs / (place - begin),
                "compression_ratio": len(text.encode()) / len(zlib.compress(text.encode())),
                "end": _STEP_S * (marked[place - 1] - marks.first_time),
                "no_speech_prob": None,
                "seek": 0,
                "start": _STEP_S * (marked[begin] - marks.first_time),
                "temperature": temperature,
                "text": text,
                "tokens": tokens,
            }
        )
        begin, sum_of_logprobs = place, 0.0
    return told
