"""The table of what is fuzzed."""

from __future__ import annotations

from typing import Final

from tools.fuzz.target import Target

_PILLOW: Final = (
    *("PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.TiffImagePlugin"),
    *("PIL.WebPImagePlugin", "PIL.ImageFile", "PIL.ImageOps"),
)
"""What of Pillow reads the accepted formats: to instrument all of it takes seconds."""

_MEDIA_MS: Final = 1_000.0
"""A few bytes may be many pixels or samples: what they may be at most takes less than this."""

TARGETS: Final = (
    Target(
        "image",
        "tools.fuzz.image",
        "bytes to RGB, upright, within limits (S5, S7, S8, S13)",
        ("semel.media", *_PILLOW),
        base_ms=_MEDIA_MS,
    ),
    Target(
        "audio",
        "tools.fuzz.audio",
        "bytes to mono float32 samples (S5, S7, S8, S13)",
        ("semel.media",),
        base_ms=_MEDIA_MS,
    ),
    Target(
        "video",
        "tools.fuzz.video",
        "bytes to the frames that are wanted (S5, S7, S8)",
        ("semel.media",),
        max_bytes=6_144,
        base_ms=_MEDIA_MS,
    ),
    Target(
        "pdf",
        "tools.fuzz.pdf",
        "a document to its number of pages, and a page to RGB (S5, S7, S8)",
        ("semel.media",),
        max_bytes=6_144,
        base_ms=_MEDIA_MS,
    ),
    Target(
        "pdf-pool",
        "tools.fuzz.pdf_pool",
        "a document to a feature, by a sandboxed process (S5, S6, S7)",
        ("semel.processing",),
        max_bytes=6_144,
        base_ms=_MEDIA_MS,
        corpus_of="pdf",
        starts_processes=True,
    ),
    Target(
        "wire",
        "tools.fuzz.wire",
        "frames of a peer to events or a reset (S10)",
        ("semel.core", "semel.wire"),
    ),
    Target(
        "safetensors",
        "tools.fuzz.safetensors_file",
        "an injected file to features, as the library reads it (S9, S10)",
        ("semel.core", "semel.wire"),
    ),
    Target(
        "pipe",
        "tools.fuzz.pipe",
        "what a pool process says to a feature or an error (S6, S10)",
        ("semel.core", "semel.processing"),
    ),
    Target(
        "resp",
        "tools.fuzz.resp",
        "what an embedding store answers to values or a failure (S10, S26)",
        ("semel.embeddings",),
        max_bytes=1_024,
        us_per_byte=200.0,  # they come one by one, and four readers read them under `tracemalloc`
    ),
    Target(
        "data-url",
        "tools.fuzz.data_url",
        "a data URL to bytes, as the standard library decodes it (S2, S11)",
        ("semel.render",),
        max_bytes=8_192,
    ),
    Target(
        "url",
        "tools.fuzz.url",
        "a URL and a redirect to host, port and target, as other parsers read them (S1, S2, S3)",
        ("semel.media", "idna"),
        max_bytes=4_096,
    ),
    Target(
        "freshness",
        "tools.fuzz.freshness",
        "fields of a response to how long it may be used (S4)",
        ("semel.media", "email"),
        max_bytes=8_192,
    ),
    Target(
        "chat",
        "tools.fuzz.chat",
        "JSON of a chat to a prompt in which no text is a placeholder (S14, S15)",
        ("semel.render",),
    ),
)

PLANTED: Final = (
    Target(
        "planted-codec",
        "tools.fuzz.planted",
        "a frame whose length nobody checks",
        ("tools.fuzz.planted",),
        max_bytes=64,
        function="run_codec",
    ),
    Target(
        "planted-image",
        "tools.fuzz.planted",
        "an image decoder that maps no errors",
        _PILLOW,
        function="run_image",
    ),
    Target(
        "planted-header",
        "tools.fuzz.planted",
        "a pattern that takes a step for each pair of blanks",
        ("tools.fuzz.planted",),
        max_bytes=8_192,
        function="run_header",
    ),
)
"""Known bugs, which show that the harness finds some; no part of what is fuzzed."""


def find(name: str) -> Target:
    """The target of that name."""
    for target in (*TARGETS, *PLANTED):
        if target.name == name:
            return target
    raise SystemExit(f"there is no target {name!r}: choose one of {', '.join(target.name for target in TARGETS)}")
