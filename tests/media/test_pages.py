"""Pages of documents: as PDFium draws them, alike everywhere, and within limits before anything is drawn (S5, S13)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from semel.core import Media, Page
from semel.errors import MediaDegenerate, MediaError, MediaTooLarge, MediaUndecodable
from semel.lab.testing.pdf import page_of, pdf
from semel.media import DecodeLimits, count_pages, image_of, image_size, pdfium_version
from tools.fuzz.pdf import seeds

LIMITS = DecodeLimits()
THREE = pdf([page_of(number) for number in range(3)])


def page(data: bytes, number: int = 1, dpi: int = 72, limits: DecodeLimits = LIMITS) -> np.ndarray:
    return np.asarray(image_of(Media("image", data, page=Page(number, dpi)), limits))


def test_each_page_is_an_image_of_its_size_in_opaque_rgb() -> None:
    assert count_pages(THREE) == 3
    pages = [page(THREE, number) for number in (1, 2, 3)]
    assert {one.shape for one in pages} == {(216, 144, 3)}
    assert len({one.tobytes() for one in pages}) == 3
    assert tuple(pages[0][0, 0]) == (255, 255, 255)
    assert tuple(pages[1][216 - 40, 22]) == (26, 77, 179)  # RGB, and not BGR
    assert page(THREE, 1, 150).shape == (450, 300, 3)


@pytest.mark.parametrize("dpi", [10, 72, 150, 299])
def test_the_header_tells_the_size_of_the_image(dpi: int) -> None:
    for data in (THREE, seeds()["turned"]):
        media = Media("image", data, page=Page(1, dpi))
        assert image_size(media, LIMITS) == image_of(media, LIMITS).size


def test_fields_of_a_form_and_annotations_are_drawn_flat_and_no_script_changes_the_page() -> None:
    plain = page(seeds()["plain"])
    form, note, script = (page(seeds()[name]) for name in ("form", "annotation", "script"))
    assert (tuple(plain[196, 50]), tuple(form[196, 50]), tuple(note[196, 50])) == (
        (255, 255, 255),
        (255, 0, 0),
        (255, 255, 0),
    )
    assert np.array_equal(script, plain)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (seeds()["encrypted"], MediaUndecodable, "encrypted"),
        (b"", MediaUndecodable, "complete PDF"),
        (b"%PDF-1.7 and nothing", MediaUndecodable, "complete PDF"),
        (pdf([]), MediaDegenerate, "no pages"),
    ],
    ids=["encrypted", "empty", "header only", "no pages"],
)
def test_what_has_no_pages_is_refused_in_our_words(data: bytes, kind: type[MediaError], words: str) -> None:
    with pytest.raises(kind, match=words):
        count_pages(data)


@pytest.mark.parametrize(
    ("media", "kind", "words"),
    [
        (Media("image", THREE, page=Page(4, 72)), MediaUndecodable, "page 4 .* missing"),
        (Media("image", pdf([b""], size=(9_000, 9_000)), page=Page(1, 300)), MediaTooLarge, "--max-image-pixels"),
        (Media("image", pdf([b""], size=(1e6, 10)), page=Page(1, 300)), MediaTooLarge, "lower its dpi"),
        (
            Media("image", pdf([b""], size=(1, 1)), page=Page(1, 30)),
            MediaDegenerate,
            "the document's page 1 at 30 dpi is 1×1",
        ),
    ],
    ids=["missing", "pixels", "side", "small"],
)
def test_a_page_over_a_limit_is_refused_before_it_is_drawn(media: Media, kind: type[MediaError], words: str) -> None:
    for look in (image_of, image_size):
        with pytest.raises(kind, match=words):
            look(media, LIMITS)


def test_the_version_of_pdfium_is_known_without_loading_it() -> None:
    assert '"build":' in pdfium_version()
    code = "import sys, semel.media as m; m.pdfium_version(); print([n for n in sys.modules if 'pdfium' in n])"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60) == b"[]\n"


FONTS = Path("/usr/share/fonts")
DRAW = """
import sys
from semel.core import Media, Page
from semel.lab.testing.pdf import page_of, pdf
from semel.media import DecodeLimits, image_of
from semel.media.decode import pages
if "control" in sys.argv:
    import pypdfium2_raw
    pages.ctypes.cast = lambda *_: None
data = pdf([page_of(1)]).replace(b"/Helvetica", b"/DejaVuXyz")
image_of(Media("image", data, page=Page(1, 72)), DecodeLimits())
"""


@pytest.mark.skipif(not FONTS.is_dir(), reason="this host has no fonts")
@pytest.mark.parametrize("word", ["", "control"])
def test_the_fonts_of_the_host_are_not_looked_at(word: str) -> None:
    """They would make a page look otherwise on another machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, bytes(FONTS), 0x20) >= 0  # IN_OPEN
    subprocess.run([sys.executable, "-c", DRAW, word], check=True, timeout=60)
    try:
        seen = bool(os.read(watch, 4_096))
    except BlockingIOError:
        seen = False
    finally:
        os.close(watch)
    assert seen == (word == "control")
