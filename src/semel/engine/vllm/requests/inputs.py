"""A submission as the input that vLLM takes, after everything in it has been checked (threats S8, S9).

vLLM itself checks next to nothing of a preprocessed input, and a mismatch ends the engine for everybody. So the prompt
and every feature are held against the contract, the family and each other here, and only then become vLLM's. An item
that comes without its feature was checked when the engine took it; its place is held against what is known of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from semel.core import Contract, Digest, Feature, FeatureInfo, Layout, Modality, Placeholder, Prompt, Submission
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.requests.item_cache import ItemCache
from semel.errors import FeatureMissing, FeatureRejected, InvalidRequest, PromptTooLong

__all__ = ["build_item", "check_prompt", "check_shapes", "engine_input", "input_items", "new_features", "set_items"]


def check_prompt(submission: Submission, contract: Contract, model: VllmModel, cache: ItemCache) -> None:
    """Check everything of a submission but the tensors of its features.

    Raises `FeatureMissing` if the cache does not hold an item that comes without its feature.
    """
    prompt = submission.prompt
    _check_size(prompt, contract)
    _check_side(prompt, model)
    if prompt.items:
        _check_places(prompt, _holdings(prompt, submission.features, cache))


def new_features(submission: Submission) -> Mapping[Digest, Feature]:
    """Return the features of a submission that its prompt has, in the order of the prompt."""
    needed = dict.fromkeys(item.digest for item in submission.prompt.items)
    return {digest: submission.features[digest] for digest in needed if digest in submission.features}


def build_item(feature: Feature, contract: Contract, model: VllmModel) -> Any:
    """Return the engine's item for a feature, which is checked. It takes long: keep it off the event loop."""
    model.admit(feature, contract)
    if fault := model.check(feature):
        raise FeatureRejected(f"the {feature.modality} feature is malformed: {fault}")
    return model.build(feature)


def check_shapes(submission: Submission, items: Mapping[Digest, Any], model: VllmModel) -> Generator[None, None, None]:
    """Check, in slices, that every digest stands for features of one shape. The registry belongs to the event loop."""
    for digest in dict.fromkeys(item.digest for item in submission.prompt.items):
        if digest not in items:
            model.known.refer(digest)
        elif not model.known.agrees(digest, submission.features[digest]):
            raise FeatureRejected(
                f"{digest!r} came before with another layout or other shapes: it stands for one feature"
            )
        yield


def engine_input(submission: Submission, items: Mapping[Digest, Any]) -> Any:
    """Return the input for `AsyncLLM.add_request` of what was checked, with None for the items that are referred to."""
    from vllm.inputs import tokens_input

    prompt = submission.prompt
    if not prompt.items:
        return tokens_input(list(prompt.token_ids), cache_salt=submission.cache_salt)
    decoder = _multimodal(prompt, items, submission.cache_salt)
    if prompt.encoder_token_ids is None:
        return decoder
    encoder = tokens_input(list(prompt.encoder_token_ids))
    return {"type": "enc_dec", "encoder_prompt": encoder, "decoder_prompt": decoder}


def input_items(prompt: Any) -> Mapping[Modality, list[Any]]:
    """Return the items of an input that `engine_input` made, by modality, to be replaced in place."""
    items: Mapping[Modality, list[Any]] = prompt.get("decoder_prompt", prompt).get("mm_kwargs", {})
    return items


def set_items(request: Any, items: Mapping[Modality, list[Any]]) -> Generator[None, None, None]:
    """Give vLLM's request, in slices, the items that its input has now; both have them in the order of the prompt."""
    rows = {modality: iter(row) for modality, row in items.items()}
    for feature in request.mm_features:
        feature.data = next(rows[feature.modality])
        yield


def _holdings(prompt: Prompt, features: Mapping[Digest, Feature], cache: ItemCache) -> Mapping[Digest, FeatureInfo]:
    """Return what every item looks like: by its feature, or else by what the engine holds."""
    known: dict[Digest, FeatureInfo] = {}
    missing: list[Digest] = []
    for digest in dict.fromkeys(item.digest for item in prompt.items):
        feature = features.get(digest)
        holding = cache.holding(digest) if feature is None else FeatureInfo.of(feature)
        if holding is None:
            missing.append(digest)
        else:
            known[digest] = holding
    if missing:
        raise FeatureMissing(missing)
    return known


def _check_size(prompt: Prompt, contract: Contract) -> None:
    if len(prompt.token_ids) > contract.max_prompt_tokens:
        raise PromptTooLong(
            f"the prompt has {len(prompt.token_ids):,} tokens; {contract.model} takes {contract.max_tokens:,} "
            "with the answer: send less, or start the engine with a larger --max-model-len"
        )
    counts: dict[Modality, int] = defaultdict(int)
    for item in prompt.items:
        counts[item.modality] += 1
    for modality, count in counts.items():
        if count > (limit := contract.max_items.get(modality, 0)):
            raise InvalidRequest(
                f"the prompt has {count:,} items of the modality {modality}, at most {limit:,} are allowed; "
                "raise it with --limit-mm-per-prompt"
            )


def _check_side(prompt: Prompt, model: VllmModel) -> None:
    """Items are on the side of the prompt where the model looks for them."""
    if (prompt.encoder_token_ids is not None) != model.is_encoder_decoder:
        kind = "an encoder-decoder" if model.is_encoder_decoder else "a decoder-only"
        raise FeatureRejected(f"the prompt is not one for {kind} model")
    if model.is_encoder_decoder and prompt.items and not prompt.timeline.is_encoder:
        raise FeatureRejected("the timeline of an encoder-decoder prompt must be the encoder's")


def _check_places(prompt: Prompt, holdings: Mapping[Digest, FeatureInfo]) -> None:
    """Check that every item stands in the prompt exactly as the layout of its feature says."""
    tokens = list(prompt.token_ids if prompt.encoder_token_ids is None else prompt.encoder_token_ids)
    for index, (item, place) in enumerate(zip(prompt.items, prompt.timeline, strict=True)):
        holding = holdings[item.digest]
        if holding.modality != item.modality:
            raise FeatureRejected(f"item {index} is called {item.modality}, its feature is {holding.modality}")
        if fault := _misplaced(place, holding.layout, tokens):
            raise FeatureRejected(f"item {index} ({item.digest!r}) {fault}")


def _misplaced(place: Placeholder, layout: Layout, tokens: Sequence[int]) -> str | None:
    if (place.length, place.mask) != (len(layout), layout.mask):
        return f"has {place!r} in the prompt, its feature has {layout!r}"
    if tuple(tokens[place.offset : place.end]) != layout.token_ids:
        return "has other tokens in the prompt than in its layout"
    return None


def _multimodal(prompt: Prompt, items: Mapping[Digest, Any], cache_salt: str | None) -> Any:
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    data: dict[Modality, list[Any]] = defaultdict(list)
    hashes: dict[Modality, list[str]] = defaultdict(list)
    ranges: dict[Modality, list[Any]] = defaultdict(list)
    for item, place in zip(prompt.items, prompt.timeline, strict=True):
        data[item.modality].append(items.get(item.digest))
        hashes[item.modality].append(item.digest.hex())
        ranges[item.modality].append(_range(place))
    return mm_input(list(prompt.token_ids), MultiModalKwargsItems(data), hashes, ranges, cache_salt=cache_salt)


def _range(place: Placeholder) -> Any:
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    mask = None if place.mask is None else torch.frombuffer(bytearray(place.mask.bits), dtype=torch.bool)
    return PlaceholderRange(place.offset, place.length, mask)
