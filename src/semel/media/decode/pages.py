"""Pages of PDFs as images: opaque 8-bit RGB over white, as PDFium draws them.

A page's content and annotations are drawn, and the fields of a form flat, as the file shows them. No script runs and
no form is filled in, because there is no form environment. Fonts are the file's and PDFium's own, never the host's, so
that a page looks alike on every machine (threats S13). Its size is checked before anything of it is drawn (S5, S29).
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from semel.core import Media, Page
from semel.errors import MediaDegenerate, MediaTooLarge, MediaUndecodable
from semel.media.decode.image import decode_image, size_from_header
from semel.media.decode.limits import DecodeLimits

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["count_pages", "image_of", "image_size", "pdfium_version"]

_POINTS_PER_INCH: Final = 72
_WHITE: Final = 0xFFFF_FFFF
_DISPLAY: Final = 0  # FLAT_NORMALDISPLAY: as on a screen, and not as in print
_FLATTENED: Final = 1
_MAX_SIDE: Final = 1 << 16
_LIBRARY: Final = "pypdfium2_raw"
_NO_FOLDERS: Final = (ctypes.c_void_p * 1)(None)  # PDFium keeps a pointer to it

logger = logging.getLogger(__name__)


def image_of(media: Media, limits: DecodeLimits) -> Image.Image:
    """Return the pixels of an image, or of a page of a document."""
    return decode_image(media.data, limits) if media.page is None else _render(media.data, media.page, limits)


def image_size(media: Media, limits: DecodeLimits) -> tuple[int, int] | None:
    """Return the width and height of what `image_of` returns, without decoding; None if only decoding tells."""
    if media.page is None:
        return size_from_header(media.data, limits)
    with _opened(media.data) as (pdfium, document):
        return _size(pdfium, document, media.page, limits)


def count_pages(data: bytes) -> int:
    """Return the number of pages of a document, at least one."""
    with _opened(data) as (pdfium, document):
        if (count := pdfium.FPDF_GetPageCount(document)) < 1:
            raise MediaDegenerate("the document has no pages")
        return int(count)


@cache
def pdfium_version() -> str:
    """Return PDFium's version and build, without loading it; it is part of a page's identity."""
    if (spec := find_spec(_LIBRARY)) is None or spec.origin is None:
        return ""
    parts = json.loads((Path(spec.origin).parent / "version.json").read_bytes())
    return json.dumps(parts, sort_keys=True)


@cache
def _library() -> Any:
    """Return PDFium's functions. Its list of folders with fonts is empty; without one it would read the host's."""
    import pypdfium2_raw as pdfium

    folders = ctypes.cast(_NO_FOLDERS, ctypes.POINTER(ctypes.POINTER(ctypes.c_char)))
    pdfium.FPDF_InitLibraryWithConfig(pdfium.FPDF_LIBRARY_CONFIG(version=2, m_pUserFontPaths=folders))
    return pdfium


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Open a document; of its pages nothing is read yet."""
    pdfium = _library()
    if not (document := pdfium.FPDF_LoadMemDocument64(data, len(data), None)):
        code = pdfium.FPDF_GetLastError()
        if code in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY):
            raise MediaUndecodable("the document is encrypted: send it without a password")
        logger.info("a document of %d bytes does not open: error %d", len(data), code)
        raise MediaUndecodable(f"the document ({len(data):,} bytes) does not open; send a complete PDF file")
    try:
        yield pdfium, document
    finally:
        pdfium.FPDF_CloseDocument(document)


def _size(pdfium: Any, document: Any, page: Page, limits: DecodeLimits) -> tuple[int, int]:
    """Return the width and height of a page in pixels, if it may have so many."""
    size = pdfium.FS_SIZEF()
    if not pdfium.FPDF_GetPageSizeByIndexF(document, page.number - 1, ctypes.byref(size)):
        raise _unreadable(page)
    sides = [side * page.dpi / _POINTS_PER_INCH for side in (size.width, size.height)]
    if not all(0 < side < math.inf for side in sides):  # also what is no number
        raise MediaDegenerate(f"page {page.number} of the document has no area")
    if max(sides) >= _MAX_SIDE:
        raise MediaTooLarge(
            f"page {page.number} of the document is over {_MAX_SIDE:,} pixels long at {page.dpi} dpi: lower its dpi"
        )
    width, height = map(math.ceil, sides)
    limits.check_size(width, height, name=f"document's page {page.number} at {page.dpi} dpi")
    return width, height


def _render(data: bytes, page: Page, limits: DecodeLimits) -> Image.Image:
    from PIL import Image

    with _opened(data) as (pdfium, document):
        width, height = _size(pdfium, document, page, limits)
        stride = (3 * width + 3) & ~3
        pixels = bytearray(stride * height)  # our own, or too little memory would end the process; no page is open yet
        handle = _load(pdfium, document, page)
        if pdfium.FPDF_GetFormType(document) and pdfium.FPDFPage_Flatten(handle, _DISPLAY) == _FLATTENED:
            pdfium.FPDF_ClosePage(handle)  # its fields are content now, but not of what was loaded
            handle = _load(pdfium, document, page)
        buffer = (ctypes.c_char * len(pixels)).from_buffer(pixels)
        bitmap = pdfium.FPDFBitmap_CreateEx(width, height, pdfium.FPDFBitmap_BGR, buffer, stride)
        flags = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER | pdfium.FPDF_RENDER_LIMITEDIMAGECACHE
        try:
            pdfium.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, _WHITE)
            pdfium.FPDF_RenderPageBitmap(bitmap, handle, 0, 0, width, height, 0, flags)
        finally:
            pdfium.FPDFBitmap_Destroy(bitmap)
            pdfium.FPDF_ClosePage(handle)
    return Image.frombytes("RGB", (width, height), pixels, "raw", "RGB", stride)


def _load(pdfium: Any, document: Any, page: Page) -> Any:
    if not (handle := pdfium.FPDF_LoadPage(document, page.number - 1)):
        raise _unreadable(page)
    return handle


def _unreadable(page: Page) -> MediaUndecodable:
    return MediaUndecodable(f"page {page.number} of the document is damaged or missing; send a complete PDF file")
