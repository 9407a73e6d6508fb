"""What a request says of its videos: bounded by name and value, with the field at fault (S5, S15)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from semel.core import Tenant, item_options, split_options, with_media_io
from semel.frontend.api.openai.requests import ChatCompletionRequest
from semel.frontend.limits import BodyLimits
from semel.media import MAX_FRAMES
from semel.render import ChatRequest
from tests.frontend.rig import Rig
from tests.render.drawn import Drawing, image_part

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
NUMBERS = (0, -2, True, "2", float("inf"), float("nan"), 10**400, [1], {"a": 1})
VALUES: dict[str, tuple[object, ...]] = {
    "fps": (*NUMBERS, -1, 1e9),
    "num_frames": (*NUMBERS, 1.5, MAX_FRAMES + 1),
    "max_frames": (*NUMBERS, -1, MAX_FRAMES + 1),
    "min_frames": (*NUMBERS, -1, MAX_FRAMES + 1),
    "max_duration": (*NUMBERS, -1, 1e9),
    "frames_indices": ([-1], [True], ["1"], [2**31], 1),
    "total_num_frames": (*NUMBERS, 2**31),
    "duration": (-1, "1", True, float("inf"), 1e9),
    "do_sample_frames": (1, "yes"),
    "video_backend": ("opencv",),
    "frame_recovery": (True,),
}


@pytest.mark.parametrize("name", VALUES)
async def test_a_hostile_value_is_refused_by_its_field_S15(app: Rig, name: str) -> None:
    for value in VALUES[name]:
        for path, body in ((CHAT, {"messages": HELLO}), (RESPONSES, {"input": "hello"})):
            sent = {**body, "media_io_kwargs": {"video": {name: value}}}
            status, param = await _refused(app, path, sent)
            assert (status, str(param).partition("[")[0]) == (400, f"media_io_kwargs.video.{name}"), value


async def _refused(app: Rig, path: str, body: dict[str, Any]) -> tuple[int, str | None]:
    content = json.dumps(body).encode()
    response = await app.client.post(path, content=content, headers={"content-type": "application/json"})
    return response.status_code, response.json()["error"]["param"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"media_io_kwargs": []}, "media_io_kwargs"),
        ({"media_io_kwargs": {"image": {"image_mode": "RGBA"}}}, "media_io_kwargs.image.image_mode"),
        ({"media_io_kwargs": {"audio": {"sampling_rate": 1}}}, "media_io_kwargs.audio.sampling_rate"),
        ({"media_io_kwargs": {"film": {}}}, "media_io_kwargs.film"),
        ({"mm_processor_kwargs": {"media_io_kwargs": {"video": {}}}}, "mm_processor_kwargs.media_io_kwargs"),
        ({"mm_processor_kwargs": {"use_audio_in_video": True}}, "mm_processor_kwargs.use_audio_in_video"),
    ],
)
async def test_what_no_request_may_say_is_refused_by_its_field(app: Rig, fields: Any, param: str) -> None:
    assert await _refused(app, CHAT, {"messages": HELLO, **fields}) == (400, param)


async def test_options_that_say_nothing_are_those_of_a_request_without(app: Rig) -> None:
    nothing: tuple[Any, ...] = (None, {}, {"video": {}}, {"image": {}, "audio": {}, "video": {"fps": None}})
    for value in nothing:
        await app.ok(CHAT, {"messages": HELLO, "media_io_kwargs": value})
        read = ChatCompletionRequest.model_validate({"messages": HELLO, "media_io_kwargs": value})
        assert not read.chat().media_io_kwargs
    status, message = await app.refused(
        MESSAGES, {"messages": HELLO, "max_tokens": 1, "media_io_kwargs": {"video": {"fps": 1}}}
    )
    assert status == 400 and "media_io_kwargs" in message


async def test_a_list_of_too_many_frames_is_refused_by_its_part_before_it_is_decoded_S5(app: Rig) -> None:
    frames = ",".join(["YWJj"] * 100_000)
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    messages = [{"role": "user", "content": [image_part(1), part]}]
    status, message = await app.refused(CHAT, {"messages": messages})
    assert status == 413 and "--max-body-values" in message  # before it is read
    app.service.body = BodyLimits(max_values=1 << 20)
    response = await app.post(CHAT, {"messages": messages})
    told = response.json()["error"]
    assert (response.status_code, told["param"]) == (400, "messages[0].content[1]")
    assert "the list has over 65,536 frames" in told["message"]
    assert app.engine.submissions == 0


async def test_the_options_of_videos_leave_images_the_items_that_they_were(drawing: Drawing) -> None:
    chat = ChatRequest([{"role": "user", "content": [image_part(1)]}])
    plain = await drawing.pipeline.read_chat(chat, Tenant())
    for fields in ({"media_io_kwargs": {"video": {"fps": 1}}}, {"mm_processor_kwargs": {"fps": 1, "num_frames": 2}}):
        asked = ChatRequest(chat.messages, **fields)
        assert (await drawing.pipeline.read_chat(asked, Tenant())).items == plain.items
        options = with_media_io(asked.mm_processor_kwargs, asked.media_io_kwargs)
        names = {
            modality: drawing.pipeline._identity(modality, options, None).digest(b"x")
            for modality in ("image", "video")
        }
        assert names["image"] == drawing.pipeline._identity("image", {}, None).digest(b"x")
        assert names["video"] != drawing.pipeline._identity("video", {}, None).digest(b"x")


def test_options_are_parted_into_those_of_the_processor_and_those_of_the_file() -> None:
    options = with_media_io({"fps": 1, "min_pixels": 4}, {"video": {"fps": 2}})
    assert split_options(options) == ({"fps": 1, "min_pixels": 4}, {"fps": 2})
    assert item_options("video", options) == options
    assert item_options("image", options) == {"min_pixels": 4}
    assert split_options(None) == ({}, {})
