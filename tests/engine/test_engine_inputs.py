"""Every tiny model without an engine: what semel gives an engine is what vLLM's renderer gives it, bit by bit.

Tensors are compared for prompts with one item. With several, a few processors pad to the largest of the prompt, in bare
vLLM as well: what is padded depends on what vLLM's cache had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semel.errors import FeatureRejected
from semel.lab.testing.models import FAMILIES
from tests.engine.engineless import Engineless
from tests.engine.families import GENERIC
from tests.engine.family_questions import family_questions, inverted
from tests.engine.parity import Chat
from tests.engine.rendering import same_embeddings, same_items
from tools.engine.lies import lies

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHATTING = [name for name in FAMILIES if name != "whisper"]


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Engineless]:
    made = Engineless.of(request.param, tiny(request.param))
    yield made
    made.renderer.shutdown()


def each(families: list[str], *, in_ci: tuple[str, ...]) -> pytest.MarkDecorator:
    """One of these families; those that are not for CI are nightly."""
    rows = [pytest.param(name, name, id=name, marks=() if name in in_ci else pytest.mark.nightly) for name in families]
    return pytest.mark.parametrize(("both", "family"), rows, indirect=["both"])


def chats_of(family: str) -> list[Chat]:
    return [chat for chat in family_questions(family) if isinstance(chat, list)]


@each(CHATTING, in_ci=(*GENERIC, "gemma4", "glm-4.1v", "pixtral"))
async def test_an_engine_gets_the_same_from_semel_as_from_vllm(both: Engineless, family: str) -> None:
    compared = 0
    for chat in chats_of(family):
        bare = both.bare(chat)
        rendered, ours = await both.ours(chat)
        assert ours.token_ids == bare.token_ids
        same_embeddings(ours, bare)
        if len(rendered.prompt.items) == 1:
            compared += same_items(ours, bare)
    assert compared >= 4


@each(CHATTING, in_ci=("pixtral",))
async def test_an_item_with_other_values_is_found(both: Engineless, family: str) -> None:
    chat = chats_of(family)[1]
    rendered, _ = await both.ours(chat)
    (feature,) = rendered.features.values()
    built = {name: element.data for name, element in both.build(inverted(feature)).items()}
    bare = both.bare(chat)
    wrong = type(bare)(bare.token_ids, bare.places, {feature.modality: [built]})
    with pytest.raises(AssertionError, match="differs"):
        same_items(wrong, bare)


@each([*GENERIC], in_ci=("mistral3",))
async def test_a_worker_refuses_room_for_other_embeddings_than_an_item_s_origin_has_S9(
    both: Engineless, family: str
) -> None:
    first, second = chats_of(family)[1:3]
    (honest, _), (other, _) = await both.ours(first), await both.ours(second)
    refused = set()
    for lie in lies(honest, other):
        (feature,) = lie.rendered.features.values()
        try:
            both.build(feature)
        except FeatureRejected:
            refused.add(lie.name)
    assert {"more room than embeddings", "less room"} <= refused
