"""Documents in the pool's processes: a page is the image that it shows, and is refused where an image would be."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest

from semel.core import Media, Page
from semel.errors import MediaTooLarge, MediaUndecodable, PromptTooLong
from semel.lab.testing.pdf import page_of, pdf
from semel.media import DecodeLimits, image_of
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pool import Pool
from tests.processing.test_pool import TARGET, Folder
from tests.waiting import until
from tools.fuzz.pdf import seeds

DOCUMENT = pdf([page_of(number) for number in range(3)])
MAX_PIXELS = 300_000


@pytest.fixture(scope="module")
async def pool(tiny: Folder) -> AsyncIterator[Pool]:
    limits = DecodeLimits(max_image_pixels=MAX_PIXELS)
    pool = await Pool.start(
        tiny("qwen2-vl"), TARGET, processes=1, spares=0, limits=limits, offers=OfferLimits(max_tokens=600)
    )
    yield pool
    await pool.close()


def page(number: int = 1, dpi: int = 72, data: bytes = DOCUMENT) -> Media:
    return Media("image", data, page=Page(number, dpi))


def as_png(media: Media) -> Media:
    file = io.BytesIO()
    image_of(media, DecodeLimits()).save(file, "PNG")
    return Media("image", file.getvalue())


@pytest.mark.parametrize("dpi", [36, 72, 150])
async def test_a_page_has_the_feature_and_the_layout_of_a_png_with_its_pixels(pool: Pool, dpi: int) -> None:
    assert await pool.count_pages(Media("image", DOCUMENT)) == 3
    for number in (1, 2, 3):
        media = page(number, dpi)
        made, expected = await pool.process(media), await pool.process(as_png(media))
        assert made == expected
        assert {name: bytes(tensor.data) for name, tensor in made.tensors.items()} == {
            name: bytes(tensor.data) for name, tensor in expected.tensors.items()
        }
        assert await pool.lay_out(media) == made.layout
    first, second = [await pool.process(page(number, dpi)) for number in (1, 2)]
    assert bytes(first.tensors["pixel_values"].data) != bytes(second.tensors["pixel_values"].data)


async def test_what_is_encrypted_missing_or_too_large_is_refused_and_the_process_goes_on(pool: Pool) -> None:
    pids = pool.pids
    with pytest.raises(MediaUndecodable, match="encrypted"):
        await pool.count_pages(Media("image", seeds()["encrypted"]))
    with pytest.raises(MediaUndecodable, match="page 4 of the document is damaged or missing"):
        await pool.process(page(4))
    with pytest.raises(MediaTooLarge, match=r"page 1 at 240 dpi is 480×720.*300,000 \(--max-image-pixels\)"):
        await pool.process(page(1, 240))
    assert pool.pids == pids


async def test_a_page_with_too_many_tokens_is_refused_by_its_size_S29(pool: Pool) -> None:
    """Its content is damaged: had it been drawn, it would have been refused for that."""
    with pytest.raises(PromptTooLong, match=r"page 1 of the document alone has .* lower its dpi"):
        await pool.process(page(1, 220), {"min_pixels": 784 * 700, "max_pixels": 784 * 800})
    assert len((await pool.process(page(1, 220))).layout) < 600


async def test_an_image_of_another_tenant_waits_for_one_page_of_a_long_document_S18_S21(pool: Pool) -> None:
    """In pages and not in seconds: how busy the machine is does not matter."""
    data = pdf([page_of(number) for number in range(80)])
    done = 0

    async def draw(number: int) -> None:
        nonlocal done
        await pool.process(page(number, 36, data), group="the document", tenant="mallory")
        done += 1

    drawing = [asyncio.create_task(draw(number)) for number in range(1, 81)]
    waited = []
    for number in (1, 2, 3, 1, 2, 3):
        await until(lambda before=done: done > before)  # type: ignore[misc]  # another page is under way
        before = done
        await pool.process(as_png(page(number)), tenant="alice")
        waited.append(done - before)
    assert done < 50, "the document was still being drawn"
    assert max(waited) <= 2, waited  # one that is drawn already, and one that is told of meanwhile
    before = done
    await pool.process(as_png(page(1)), group="the document", tenant="mallory")
    assert done - before > 20, "the control: first come, first served"
    await asyncio.gather(*drawing)


async def test_pages_of_one_document_are_quarantined_by_themselves(pool: Pool) -> None:
    refusal = MediaUndecodable("page 2 crashes")
    await pool._deadly.quarantine(page(2), {}, refusal)
    with pytest.raises(MediaUndecodable, match="page 2 crashes"):
        await pool.process(page(2))
    await pool.process(page(1))
    with pytest.raises(MediaUndecodable, match="page 2 crashes"):
        await pool.process(page(2))
