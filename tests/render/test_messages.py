from __future__ import annotations

from typing import Any

import pytest

from semel.core import Media
from semel.errors import InvalidRequest, MediaError
from semel.render.chat.messages import Attachment, Conversation, Message, Text, ToolReference

IMAGE = "data:image/png;base64,YWJj"


def parsed(**message: Any) -> Message:
    return Conversation.parse([{"role": "user", **message}]).messages[0]


def part(value: Any) -> Any:
    (only,) = parsed(content=[value]).parts
    return only


def clip_of(name: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "YWJj", "format": name}}


@pytest.mark.parametrize(
    ("value", "media"),
    [
        ({"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}, Media("image", b"abc", "image/png")),
        ({"type": "image_url", "image_url": IMAGE}, Media("image", b"abc", "image/png")),
        ({"type": "input_image", "image_url": IMAGE}, Media("image", b"abc", "image/png")),
        ({"image_url": IMAGE}, Media("image", b"abc", "image/png")),
        (
            {"type": "audio_url", "audio_url": {"url": "data:audio/ogg;base64,YWJj"}},
            Media("audio", b"abc", "audio/ogg"),
        ),
        (
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,YWJj"}},
            Media("video", b"abc", "video/mp4"),
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}},
            Media("audio", b"abc", "audio/wav"),
        ),
    ],
)
def test_media_parts_of_every_type_become_media(value: dict[str, Any], media: Media) -> None:
    assert part(value) == Attachment(media)
    assert part({**value, "uuid": "u"}) == Attachment(media, name="u")


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_of_every_type_become_text(kind: str) -> None:
    assert part({"type": kind, "text": "hi"}) == Text("hi")
    assert part({"type": "refusal", "refusal": "no"}) == Text("no")
    assert part({"type": "thinking", "thinking": "hm", "closed": True}) == Text("hm")
    assert part({"type": "tool_reference", "name": "look"}) == ToolReference("look")


def test_a_null_text_or_refusal_is_left_out() -> None:
    content = [{"type": "text", "text": None}, {"type": "refusal", "refusal": None}, {"type": "refusal"}]
    assert parsed(content=content).parts == ()


def test_fields_that_the_api_does_not_know_are_kept_for_the_template() -> None:
    assert part({"type": "text", "text": "hi", "cache": {"a": 1}}) == Text("hi", {"cache": {"a": 1}})
    assert part({"type": "image_url", "image_url": IMAGE, "fps": 2}).extra == {"fps": 2}


def test_sources_are_listed_in_the_order_of_the_messages() -> None:
    clip = {"type": "input_audio", "input_audio": {"data": "Yg==", "format": "wav"}}
    image = {"type": "image_url", "image_url": IMAGE}
    messages = [{"role": "user", "content": ["a", image, clip]}, {"role": "user", "content": [image]}]
    attachments = Conversation.parse(messages).attachments
    assert [attachment.source.modality for attachment in attachments] == ["image", "audio", "image"]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ({}, "messages: must be a list"),
        ([], "messages: must be a list with at least one message"),
        (["hi"], "messages[0]: must be an object, not a string"),
        ([{"content": "hi"}], 'messages[0].role: must be a string such as "user", not null'),
        ([{"role": 1}], "messages[0].role: must be a string"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content: must be a string, a list of parts or null, not a number",
        ),
        ([{"role": "user", "content": {}}], "not an object"),
        ([{"role": "user", "content": [True]}], "messages[0].content[0]: must be an object or a string, not a boolean"),
        (
            [{"role": "user", "content": [{"text": "hi"}]}],
            'messages[0].content[0].type: must be a string such as "text"',
        ),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type: must be a string"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text: must be a string"),
        (
            [{"role": "user", "content": [{"type": "input_text"}]}],
            "messages[0].content[0].text: must be a string, not null",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": ["b", {"type": "image_embeds"}]}],
            "messages[1].content[1]: type 'image_embeds' is not supported: use one of audio_url, document, file",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].image_url: must be a string, not null",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "image_url: must be a string, not null",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}], "must be an object with"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "input_audio.data: must be a string",
        ),
        (
            [{"role": "user", "content": [clip_of("a" * 65)]}],
            'messages[0].content[0].input_audio.format: must be a short name such as "wav", not \'aaaaaaaa',
        ),
        ([{"role": "user", "content": [clip_of("wav\nERROR all is lost")]}], "'wav\\nERROR all is lost' of 21"),
        ([{"role": "user", "content": [clip_of("wäv")]}], "input_audio.format: must be a short name"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls: must be a list, not an object"),
        ([{"role": "assistant", "tool_calls": ["a"]}], "messages[0].tool_calls[0]: must be an object of type"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "reasoning": 1}], "messages[0].reasoning: must be a string"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(messages: Any, error: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Conversation.parse(messages)
    assert error in str(caught.value)


@pytest.mark.parametrize("name", ["wav", "x-wav", "pcm16", "vnd.wave", "audio/mp3", "webm;codecs=opus", "a" * 64])
def test_names_of_formats_that_clients_send_are_taken(name: str) -> None:
    assert part(clip_of(name)) == Attachment(Media("audio", b"abc", f"audio/{name}"))


def test_media_errors_name_the_place() -> None:
    with pytest.raises(MediaError, match=r"^messages\[0\]\.content\[1\]: the image is not valid base64"):
        parsed(content=["a", {"type": "image_url", "image_url": "data:image/png;base64,%"}])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ("{broken", {}),
        (5, {}),
        ("[" * 100_000, {}),
        ("1" * 5000, {}),
    ],
    ids=lambda value: repr(value)[:16],
)
def test_s15_arguments_of_a_call_become_an_object_whatever_they_are(arguments: Any, expected: dict[str, Any]) -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    shown = parsed(role="assistant", tool_calls=[call]).fields["tool_calls"]
    assert shown == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] == arguments, "the request itself is left alone"


def test_each_role_keeps_the_fields_that_its_templates_know() -> None:
    assert parsed(
        role="assistant", tool_calls=[], reasoning=None, reasoning_content="hm", name="a", other=1
    ).fields == {"reasoning": "hm", "reasoning_content": "hm", "name": "a"}
    assert parsed(role="tool", tool_call_id="1", tool_calls=[1], name=5).fields == {"tool_call_id": "1"}
    assert parsed(role="developer", task="t").fields == {"task": "t", "tools": None}
