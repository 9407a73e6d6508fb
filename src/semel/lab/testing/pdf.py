"""PDF files of our own, byte by byte: pages that differ, and whatever else a test wants in them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["page_of", "pdf"]


def page_of(number: int) -> bytes:
    """Return the content of a page that shows its number, and no other page's."""
    shade, width = (number % 10) / 10, 10 + number % 97
    text = b"BT /F1 18 Tf 20 200 Td (page %d) Tj ET" % number
    return b"%s %.1f 0.3 0.7 rg 20 30 %d 90 re f" % (text, shade, width)


def pdf(
    pages: Sequence[bytes],
    *,
    size: tuple[float, float] = (144, 216),
    page: bytes = b"",
    catalog: bytes = b"",
    objects: Sequence[bytes] = (),
    trailer: bytes = b"",
) -> bytes:
    """Return a file with these contents of pages.

    `page`, `catalog` and `trailer` are added to those dictionaries; `objects` are numbered from 4.
    """
    first = 4 + len(objects)
    kids = b" ".join(b"%d 0 R" % (first + 2 * index) for index in range(len(pages)))
    bodies = [
        b"<</Type/Catalog/Pages 2 0 R%s>>" % catalog,
        b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(pages), kids),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        *objects,
    ]
    box = b"%.2f %.2f" % size
    for index, content in enumerate(pages):
        bodies += [
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %s]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R%s>>"
            % (box, first + 2 * index + 1, page),
            b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        ]
    out, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(bodies, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(bodies) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (len(bodies) + 1, trailer, start)
    return bytes(out)
