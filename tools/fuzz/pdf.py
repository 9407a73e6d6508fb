"""PDFium on any bytes: the number of pages, and the first page as an image."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from random import Random
from typing import Final

from semel.core import Media, Page
from semel.errors import RequestError
from semel.lab.testing.pdf import page_of, pdf
from semel.media import DecodeLimits, count_pages, image_of, image_size
from tools.fuzz.oracle import check_decoders_message, expect

_LIMITS: Final = DecodeLimits(max_image_pixels=1 << 16)
_DPI: Final = 36
_MAX_EDITS: Final = 4
_TOKEN: Final = re.compile(rb"/\w+|-?\d+(?:\.\d+)?|\[|\]|<<|>>|\bR\b|\w+")
_WORDS: Final = (
    *(b"-1", b"0", b"0.0001", b"4", b"65536", b"2147483647", b"4294967296", b"99999999999999999999", b"1e9", b"null"),
    *(b"1 0 R", b"2 0 R", b"3 0 R", b"4 0 R", b"[2 0 R 2 0 R]", b"[0 0 1e9 1]", b"[0 0 14400 14400]", b"<</A 4 0 R>>"),
    *(b"/FlateDecode", b"/LZWDecode", b"/DCTDecode", b"/JPXDecode", b"/JBIG2Decode", b"/CCITTFaxDecode"),
    *(b"/ASCII85Decode", b"/RunLengthDecode", b"/DeviceCMYK", b"/Indexed", b"/Pattern", b"/ICCBased", b"/Type3"),
    *(b"/Filter", b"/DecodeParms<</Predictor 15/Columns 2147483647>>", b"/SMask", b"/Parent 2 0 R", b"/UserUnit 1e6"),
    *(b"/Kids[2 0 R]", b"/Count 2147483647", b"/Prev 0", b"/Rotate 91", b"/XObject<</I 4 0 R>>", b"/ObjStm", b"/XRef"),
    *(b"q", b"Q", b"/I Do", b"BT", b"W n", b"1e9 0 0 1e9 0 0 cm", b"0 0 1e9 1e9 re f", b"[1e-9] 0 d 0 0 m 1e6 1e6 l S"),
)
"""What means something to a reader of PDFs."""


def run(data: bytes) -> None:
    """Whatever the bytes, there are pages, and the first is an image of the size that it said, or an error of ours."""
    try:
        pages = count_pages(data)
        expect(0 < pages < 1 << 31, f"there are {pages:,} pages")
        media = Media("image", data, page=Page(1 + len(data) % min(pages, 4), _DPI))
        size = image_size(media, _LIMITS)
        image = image_of(media, _LIMITS)
    except RequestError as error:
        check_decoders_message(error)
        return
    width, height = image.size
    expect(image.mode == "RGB" and image.size == size, f"{image.mode} of {image.size}, and not of {size} (S13)")
    expect(min(image.size) >= _LIMITS.min_image_side, f"{image.size} is too small (S8)")
    expect(width * height <= _LIMITS.max_image_pixels, f"{image.size} is too large (S5)")


def mutate(data: bytes, random: Random) -> bytes | None:
    """Put other tokens in the places of some, in front of them, or nothing."""
    for _ in range(random.randint(1, _MAX_EDITS)):
        if not (tokens := [*_TOKEN.finditer(data)]):
            return None
        old, other = random.choice(tokens), random.choice(tokens)
        new = random.choice((random.choice(_WORDS), random.choice(_WORDS), other[0], b""))
        data = data[: old.start()] + b" " + new + b" " + data[random.choice((old.start(), old.end(), old.end())) :]
    return data


def seeds() -> Mapping[str, bytes]:
    """Text, pictures in each compression that is short, forms, annotations, encryption, and trees of pages."""
    packed = zlib.compress(page_of(1))
    grey = b"<</Type/XObject/Subtype/Image/Width 4/Height 4/ColorSpace/DeviceGray/BitsPerComponent 8%s/Length %d>>"
    drawn = b"q 60 0 0 60 20 20 cm /I Do Q"
    image = b"/Resources<</XObject<</I 4 0 R>>/Font<</F1 3 0 R>>>>"
    flate = zlib.compress(bytes(range(16)))
    field = (
        b"<</Type/Annot/Subtype/Widget/FT/Tx/T(a)/V(b)/Rect[10 10 60 30]/F 4/AP<</N 5 0 R>>"
        b"/A<</S/JavaScript/JS(app.alert\\(1\\))>>>>"
    )
    look = b"<</Type/XObject/Subtype/Form/BBox[0 0 50 20]/Length 23>>stream\n1 0 0 rg 0 0 50 20 re f\nendstream"
    note = b"<</Type/Annot/Subtype/Highlight/Rect[10 10 60 30]/QuadPoints[10 30 60 30 10 10 60 10]/C[1 1 0]>>"
    function = b"<</FunctionType 2/Domain[0 1]/C0[1 0 0]/C1[0 0 1]/N 1>>"
    shading = b"<</ShadingType 2/ColorSpace/DeviceRGB/Coords[0 0 99 99]/Function 5 0 R/Extend[true true]>>"
    return {
        "plain": pdf([page_of(1)]),
        "pages": pdf([page_of(number) for number in range(3)]),
        "flate": pdf(
            [b"q"], objects=[b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(packed), packed)]
        ).replace(b"/Contents 6 0 R", b"/Contents 4 0 R"),
        "image": pdf([drawn], page=image, objects=[_stream(grey, b"", bytes(range(16)))]),
        "image-flate": pdf([drawn], page=image, objects=[_stream(grey, b"/Filter/FlateDecode", flate)]),
        "image-hex": pdf([drawn], page=image, objects=[_stream(grey, b"/Filter/ASCIIHexDecode", b"00FF" * 8 + b">")]),
        "form": pdf(
            [page_of(1)], page=b"/Annots[4 0 R]", catalog=b"/AcroForm<</Fields[4 0 R]>>", objects=[field, look]
        ),
        "annotation": pdf([page_of(1)], page=b"/Annots[4 0 R]", objects=[note]),
        "encrypted": pdf(
            [page_of(1)],
            objects=[b"<</Filter/Standard/V 1/R 2/O<%s>/U<%s>/P -4>>" % (b"41" * 32, b"42" * 32)],
            trailer=b"/Encrypt 4 0 R/ID[<00><00>]",
        ),
        "shading": pdf([b"/S sh"], page=b"/Resources<</Shading<</S 4 0 R>>>>", objects=[shading, function]),
        "turned": pdf([page_of(1)], page=b"/Rotate 90/CropBox[10 10 90 90]"),
        "script": pdf([page_of(1)], catalog=b"/OpenAction<</S/JavaScript/JS(while \\(1\\);)>>"),
        "rebuilt": pdf([page_of(1)]).replace(b"startxref", b"startxxxx"),
    }


def _stream(head: bytes, filter_: bytes, data: bytes) -> bytes:
    return head % (filter_, len(data)) + b"stream\n" + data + b"\nendstream"
