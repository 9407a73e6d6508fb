"""Every text that a client can be told about its media. Closed: what matches none of these is foreign (threats S7)."""

from __future__ import annotations

import re
from typing import Final

_N: Final = r"[\d,]+"
_ITEM: Final = "(?:image|audio|video)"
_SUBJECT: Final = rf"(?:the (?:{_ITEM}|document)|page {_N} of the document)"
_SIZE: Final = r"the (?:image|video|document's page \d+ at \d+ dpi) is \d+×\d+"
_FRAME: Final = r"frame \d+ of the list"
_SMALLER: Final = "send a smaller one"
_SMALLER_VIDEO: Final = "send a shorter or a smaller one"
_OURS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_SIZE}; each side needs \d+ pixels \(--min-image-side\)",
        rf"{_SIZE}, {_N} pixels; the limit is {_N} \(--max-image-pixels\)",
        rf"the image has more pixels than the limit of {_N} \(--max-image-pixels\)",
        rf"the image \({_N} bytes\) does not decode; send a complete BMP, GIF, JPEG, PNG, TIFF, WEBP file",
        rf"the image has more scans than the limit of {_N}; save it with fewer",
        "the image has samples of 32 bits, which viewers show differently; save it with 8 bits",
        rf"the (?:clip|video) \({_N} bytes\) does not decode; send a complete file",
        r"the (?:clip|video) has a codec that is not accepted; send [\w., ]+",
        rf"the document \({_N} bytes\) does not open; send a complete PDF file",
        "the document has no pages",
        "the document is encrypted: send it without a password",
        rf"page {_N} of the document is damaged or missing; send a complete PDF file",
        rf"page {_N} of the document is over {_N} pixels long at {_N} dpi: lower its dpi",
        rf"page {_N} of the document has no area",
        "the clip has no samples",
        "the clip has samples that are no numbers, or far beyond full scale",
        rf"the clip has {_N} samples a second; (?:it needs|the limit is) {_N}",
        rf"the clip has {_N} channels; the limit is {_N} \(--max-audio-channels\)",
        r"the clip is longer than the limit of [\d.e+]+ s \(--max-audio-s\)",
        r"the video is longer than the limit of [\d.e+]+ s \(--max-video-s\)",
        rf"the video has {_N} frames; the limit is {_N} \(--max-video-frames\)",
        rf"{_N} frames of the video have {_N} pixels; the limit is {_N} \(--max-video-pixels\): {_SMALLER_VIDEO}",
        "the video does not say how (?:long it is|many frames a second has)",
        "the video has none of the frames that the model looks at",
        rf"the video has {_N} frames, too few for this model",
        rf"the video has over {_N} packets up to its frame {_N}; encode it again",
        rf"{_FRAME} is not valid base64",
        rf"{_FRAME}: the image \({_N} bytes\) does not decode; send a complete BMP, GIF, JPEG, PNG, TIFF, WEBP file",
        rf"{_FRAME} is \d+×\d+, the first one \d+×\d+; send frames of one size",
        rf"{_FRAME}: the image is \d+×\d+; each side needs \d+ pixels \(--min-image-side\)",
        rf"{_FRAME}: the image is \d+×\d+, {_N} pixels; the limit is {_N} \(--max-image-pixels\)",
        rf"{_FRAME}: the image has [\w ,]+ 8 bits",
        rf"the list has {_N} frames; the limit is {_N} \(--max-video-frames\)",
        rf"the list's frames have more pixels than the limit of {_N} \(--max-video-pixels\): send [\w ]+ ones",
        "the video turns its frames while it plays; send one that does not",
        rf"the {_ITEM} is too small or too short for this model to see anything of it",
        rf"the model's processor refused the {_ITEM}; check its proportions and `mm_processor_kwargs`",
        rf"the media needs more memory than the limit of {_N} bytes \(--max-processing-memory-gb\); {_SMALLER}",
        rf"preprocessing {_SUBJECT} takes longer than the limit of [\d.]+ s \(--max-processing-s\); {_SMALLER}",
        rf"{_SUBJECT} crashes the process that decodes it; send it in another format",
    )
)


def is_ours(message: str) -> bool:
    """Whether a text is one of ours, with nothing in it but numbers."""
    return any(pattern.fullmatch(message) for pattern in _OURS)
