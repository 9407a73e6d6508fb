"""S5, S6, S7: damaged files of every format get a value or a refusal in our words, and end no process.

`scripts/hostile` does the same with as many as one likes.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from semel.core import Media
from semel.errors import RequestError
from semel.media import decode_audio, decode_image, decode_video
from tests.security.corpus import specimens
from tests.security.messages import is_ours
from tools.security.damaged import LIMITS, attack, damaged

IN_PROCESS = 1_500
THROUGH_POOLS = 5_000
DOCUMENTS = 500


def decode(media: Media) -> object:
    match media.modality:
        case "image":
            return decode_image(media.data, LIMITS)
        case "audio":
            return decode_audio(media.data, LIMITS, sampling_rate=16_000)
        case "video":
            return decode_video(media.data, LIMITS, choose=lambda header: range(min(header.num_frames, 8)))


@pytest.mark.parametrize("specimen", specimens(), ids=lambda specimen: specimen.name)
def test_every_file_decodes_before_it_is_damaged(specimen: object) -> None:
    """Or else the damage would prove nothing."""
    assert decode(specimen.media) is not None  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_fifteen_hundred_damaged_files_are_decoded_or_refused_in_our_words_S7() -> None:
    foreign, refused, naive = [], 0, 0
    for name, media in damaged(IN_PROCESS, seed=0, kinds=["image", "audio", "video"]):
        try:
            decode(media)
        except RequestError as error:
            refused += 1
            foreign += [] if is_ours(str(error)) else [f"{name}: {error}"]
            naive += media.modality == "image" and shows_an_address(media.data)
        except MemoryError:  # FFmpeg's word for a size that cannot be; a pool process tells which limit it was
            refused += 1
    assert not foreign
    assert IN_PROCESS / 4 < refused < IN_PROCESS * 0.9, "damage that is too little or too much proves nothing"
    assert naive, "the control: without us, clients would be shown addresses"


def shows_an_address(data: bytes) -> bool:
    try:
        Image.open(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001 - the control takes whatever it is
        return "0x" in str(error)
    return False


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_five_thousand_damaged_files_are_answered_by_pools_that_stay_in_their_limits_S5_S6_S7(
    tmp_path: Path,
) -> None:
    findings = await attack(tmp_path, files=THROUGH_POOLS, seed=1)
    assert findings.faults == []
    assert findings.answered == THROUGH_POOLS
    assert findings.values.total() > THROUGH_POOLS / 10
    assert findings.crashed == 0


@pytest.mark.slow
async def test_hundreds_of_damaged_documents_are_answered_too_S5_S6_S7(tmp_path: Path) -> None:
    """Their pages are counted, and the first is made a feature. PDFium is native code: not in this process."""
    findings = await attack(tmp_path, files=DOCUMENTS, seed=2, kinds=["document"])
    assert findings.faults == []
    assert findings.answered == DOCUMENTS
    assert DOCUMENTS / 10 < findings.values.total() < DOCUMENTS * 0.9
    assert findings.crashed == 0
