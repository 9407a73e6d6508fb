from __future__ import annotations

from typing import Any

from semel.core import Modality
from semel.render.chat.messages import Conversation
from semel.render.chat.template_messages import transcribe, without_developer

IMAGE = {"type": "image_url", "image_url": "data:image/png;base64,YWJj", "fps": 2}
CLIP = {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}}


def insertion(modality: Modality, index: int, /) -> str:
    return {"image": "<image>", "audio": f"Audio {index}: <audio>", "video": ""}[modality]


def parts(*messages: dict[str, Any]) -> list[dict[str, object]]:
    return transcribe(Conversation.parse([*messages]), content_format="openai", insertion=insertion)


def strings(*messages: dict[str, Any]) -> list[dict[str, object]]:
    return transcribe(Conversation.parse([*messages]), content_format="string", insertion=insertion)


def test_items_stay_between_their_texts_if_the_engine_interleaves_them() -> None:
    turns = [{"role": "user", "content": ["a", IMAGE, "b", CLIP, "c"]}, {"role": "user", "content": [CLIP, "d", IMAGE]}]

    def contents(*, interleaves: bool) -> list[object]:
        conversation = Conversation.parse(turns)
        shown = transcribe(conversation, content_format="string", insertion=insertion, interleaves=interleaves)
        return [message["content"] for message in shown]

    assert contents(interleaves=True) == ["a\n<image>\nb\nAudio 1: <audio>\nc", "Audio 2: <audio>\nd\n<image>"]
    assert contents(interleaves=False) == [  # the flag that is lost
        "<image>\nAudio 1: <audio>\na\nb\nc",
        "Audio 2: <audio>\n<image>\nd",
    ]


def test_a_template_that_takes_parts_gets_them_in_place() -> None:
    content = ["a", IMAGE, {"type": "text", "text": "", "x": 1}, {"type": "tool_reference", "name": "look"}, CLIP]
    assert parts({"role": "user", "content": content, "name": "n"}) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "fps": 2},
                {"type": "text", "text": "", "x": 1},
                {"type": "tool_reference", "name": "look"},
                {"type": "audio"},
            ],
            "name": "n",
        }
    ]


def test_answers_of_tools_are_strings_even_for_a_template_that_takes_parts() -> None:
    shown = parts({"role": "tool", "content": ["a", "b"]}, {"role": "tool"}, {"role": "tool", "content": ["a", IMAGE]})
    assert [message["content"] for message in shown] == [
        "a\nb",
        "",
        [{"type": "text", "text": "a"}, {"type": "image", "fps": 2}],
    ]


def test_a_template_that_takes_strings_gets_all_items_of_a_message_before_its_texts() -> None:
    shown = strings(
        {"role": "user", "content": ["a", CLIP, IMAGE, "", "b", CLIP]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [CLIP]},
    )
    assert [message["content"] for message in shown] == [
        "Audio 1: <audio>\nAudio 2: <audio>\n<image>\na\nb",
        "",
        "Audio 3: <audio>",
    ]


def test_an_item_whose_family_inserts_nothing_leaves_no_line() -> None:
    video = {"type": "video_url", "video_url": "data:video/mp4;base64,YWJj"}
    assert strings({"role": "user", "content": [video, "a"]})[0]["content"] == "a"


def test_a_developer_becomes_the_system() -> None:
    assert without_developer(parts({"role": "developer", "content": "a", "tools": [1]}, {"role": "user"})) == [
        {"role": "system", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": []},
    ]


def test_several_system_messages_become_one_at_the_front() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": ["a", "b"]},
        {"role": "user", "content": "c"},
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "developer", "content": ""},
    ]
    for shown in (without_developer(parts(*turns)), without_developer(strings(*turns))):
        assert shown[0] == {"role": "system", "content": "a\nb\n\nd"}
        assert [message["role"] for message in shown] == ["system", "user"]
