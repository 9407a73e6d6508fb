"""The size of the encoder cache: what is chosen is what the engine's cache has, and what it takes is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semel.errors import ConfigError

pytestmark = pytest.mark.engine  # they import vLLM; none starts it

OF_VLLM = 4_096
FLAGS = ["--dtype", "float32", "--max-model-len", "4096", "--max-num-batched-tokens", str(OF_VLLM)]


def config(tiny: Callable[[str], Path], embeddings: int | None, model: str = "qwen2-vl") -> Any:
    from semel.engine.vllm.arguments import create_config, parse_engine_flags

    return create_config(parse_engine_flags(str(tiny(model)), FLAGS, encoder_cache_embeddings=embeddings))


@pytest.mark.parametrize(("chosen", "capacity"), [(None, OF_VLLM), (OF_VLLM, OF_VLLM), (40_000, 40_000)])
def test_the_cache_has_the_size_that_was_chosen(chosen: int | None, capacity: int, tiny: Callable[[str], Path]) -> None:
    from semel.engine.vllm.plugins.encoder_cache import EncoderCache

    manager = EncoderCache.create_manager(cache_size=OF_VLLM, vllm_config=config(tiny, chosen))
    assert manager.cache_size == manager.num_free_slots == capacity


def test_a_cache_smaller_than_vllms_is_refused_and_never_made(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's number may be larger than the flag shows, if one item is."""
    from semel.engine.vllm.plugins.encoder_cache import EncoderCache

    with pytest.raises(ConfigError, match=r"--encoder-cache-embeddings 4,095 is less than the 4,096 .*lower --max"):
        config(tiny, OF_VLLM - 1)
    with caplog.at_level(logging.WARNING, "semel"):
        manager = EncoderCache.create_manager(cache_size=16_384, vllm_config=config(tiny, OF_VLLM))
    assert manager.cache_size == 16_384
    assert "16384 embeddings, not 4096" in caplog.text


def test_an_encoder_decoder_keeps_vllms_number(tiny: Callable[[str], Path]) -> None:
    from semel.engine.vllm.arguments import create_config, parse_engine_flags
    from semel.engine.vllm.model.encoder_size import EncoderCacheSize
    from semel.engine.vllm.plugins.encoder_cache import EncoderCache

    flags = ["--dtype", "float32", "--max-num-batched-tokens", "3200"]
    whisper = create_config(parse_engine_flags(str(tiny("whisper")), flags, encoder_cache_embeddings=40_000))
    assert EncoderCache.create_manager(cache_size=3_200, vllm_config=whisper).cache_size == 3_200
    assert EncoderCacheSize.from_config(whisper, 3_200) is None


def test_another_cache_takes_no_size_of_ours(tiny: Callable[[str], Path]) -> None:
    from semel.engine.vllm.arguments import parse_engine_flags

    other = ["--ec-manager-config", '{"encoder_cache_manager_cls": "their.Cache"}']
    with pytest.raises(ConfigError, match="semel's encoder cache: leave it out"):
        parse_engine_flags(str(tiny("qwen2-vl")), other, encoder_cache_embeddings=40_000)
    parse_engine_flags(str(tiny("qwen2-vl")), other)  # the control


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "many"])
def test_a_size_that_is_none_is_refused(wrong: object) -> None:
    from semel.engine.vllm.plugins.encoder_cache import EncoderCacheConfig

    with pytest.raises(ConfigError, match="whole number of at least 1"):
        EncoderCacheConfig.parse({"embeddings": wrong})


def test_what_it_takes_is_told_with_what_vllm_does_not_count(tiny: Callable[[str], Path]) -> None:
    """The tiny model: 128 wide, 4 bytes each."""
    from semel.engine.vllm.model.encoder_size import EncoderCacheSize

    told = str(EncoderCacheSize.from_config(config(tiny, 40_000), OF_VLLM))
    assert "40,000 embeddings of 512 bytes each, 20.5 MB" in told
    assert "does not count 18.4 MB of it: on a GPU, leave them free with --gpu-memory-utilization" in told
    assert "count" not in str(EncoderCacheSize.from_config(config(tiny, None), OF_VLLM))


def test_embeddings_of_several_layers_side_by_side_count_each() -> None:
    """As of Qwen3-VL: three layers of the encoder beside its output."""
    from semel.engine.vllm.model.encoder_size import EncoderCacheSize

    vision = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])
    model = SimpleNamespace(
        supports_multimodal_inputs=True,
        is_encoder_decoder=False,
        hf_config=SimpleNamespace(vision_config=vision),
        get_inputs_embeds_size=lambda: 4_096,
        dtype=SimpleNamespace(itemsize=2),
    )
    ours = SimpleNamespace(
        encoder_cache_manager_cls="semel.engine.vllm.plugins.encoder_cache.EncoderCache", manager_config={}
    )
    size = EncoderCacheSize.from_config(SimpleNamespace(model_config=model, ec_manager_config=ours), 8_192)
    assert size is not None
    assert size.embedding_bytes == 4 * 4_096 * 2
