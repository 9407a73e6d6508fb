"""A tiny Whisper: encoder-decoder, one clip of up to 30 s per request, 1,500 encoder positions.

All languages and timestamps are in the vocabulary, because transcription looks them up by name. The output head is the
table of token embeddings, so a token that is silenced in one is silenced in the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from semel.testing.models import weights
from semel.testing.models.folder import write_folder
from semel.testing.models.tokenizer import Vocabulary, train

if TYPE_CHECKING:
    from transformers import GenerationConfig, WhisperConfig, WhisperTokenizer

__all__ = ["write"]

_FAMILY = "whisper"
_VOCABULARY_TOKENS = 2048
_MODEL_SIZE = 128
_MEL_BINS = 80
_MAX_TARGET_POSITIONS = 448
_END = "<|endoftext|>"
_START = "<|startoftranscript|>"
_TASKS = ("translate", "transcribe")
_MARKS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
_TIMESTAMPS = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))

_GAINS = {
    "*.encoder.conv1.weight": 10.0,
    "*.encoder.conv2.weight": 4.0,
    "*.encoder.embed_positions.weight": 0.6,
    "*.encoder.*.q_proj.weight": 1.5,
    "*.encoder.*.k_proj.weight": 1.5,
    "*.encoder.*.out_proj.weight": 0.7,
    "*.decoder.embed_*.weight": 0.1,
    "*.decoder.layer_norm.weight": 3.0,
    "*.encoder_attn.q_proj.weight": 2.5,
    "*.encoder_attn.k_proj.weight": 2.5,
    "*.encoder_attn.v_proj.weight": 3.0,
    "*.q_proj.weight": 2.2,
    "*.k_proj.weight": 2.2,
    "*.v_proj.weight": 2.0,
    "*.out_proj.weight": 2.0,
    "*.fc1.weight": 1.5,
    "*.fc2.weight": 1.5,
}
_END_GAIN = 0.7


def write(directory: Path) -> None:
    """Write the model folder into `directory`, which exists."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor

    languages = _languages()
    specials = (_END, _START, *languages, *(f"<|{task}|>" for task in _TASKS), *_MARKS)
    vocabulary = train(_VOCABULARY_TOKENS - len(specials) - len(_TIMESTAMPS))
    tokenizer = _tokenizer(vocabulary, specials)
    config = _config(tokenizer)
    processor = WhisperProcessor(WhisperFeatureExtractor(feature_size=_MEL_BINS), tokenizer)
    tensors = weights.make(
        _FAMILY,
        WhisperForConditionalGeneration,
        config,
        _GAINS,
        head="model.decoder.embed_tokens.weight",
        tied="proj_out.weight",
        spoken=vocabulary.spoken(),
        end=config.eos_token_id,
        end_gain=_END_GAIN,
    )
    generation = _generation_config(tokenizer, languages)
    write_folder(
        directory,
        config=config,
        generation=generation,
        processor=processor,
        tensors=tensors,
    )


def _languages() -> tuple[str, ...]:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return tuple(f"<|{code}|>" for code in LANGUAGES)


def _tokenizer(vocabulary: Vocabulary, specials: tuple[str, ...]) -> WhisperTokenizer:
    from tokenizers import AddedToken
    from transformers import WhisperTokenizer

    tokenizer = WhisperTokenizer(
        vocab=vocabulary.extended([*specials, *_TIMESTAMPS]),
        merges=vocabulary.merges,
        pad_token=_END,
        extra_special_tokens=list(specials[1:]),
        model_max_length=_MAX_TARGET_POSITIONS,
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _TIMESTAMPS])
    return tokenizer


def _config(tokenizer: WhisperTokenizer) -> WhisperConfig:
    from transformers import WhisperConfig

    end = tokenizer.convert_tokens_to_ids(_END)
    return WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        dtype="float32",
        vocab_size=_VOCABULARY_TOKENS,
        num_mel_bins=_MEL_BINS,
        d_model=_MODEL_SIZE,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=2 * _MODEL_SIZE,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=2 * _MODEL_SIZE,
        max_source_positions=1500,
        max_target_positions=_MAX_TARGET_POSITIONS,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids(_START),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        begin_suppress_tokens=None,
    )


def _generation_config(tokenizer: WhisperTokenizer, languages: tuple[str, ...]) -> GenerationConfig:
    from transformers import GenerationConfig

    id_of = tokenizer.convert_tokens_to_ids
    end = id_of(_END)
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=id_of(_START),
        is_multilingual=True,
        lang_to_id={language: id_of(language) for language in languages},
        max_initial_timestamp_index=50,
        max_length=_MAX_TARGET_POSITIONS,
        no_timestamps_token_id=id_of("<|notimestamps|>"),
        prev_sot_token_id=id_of("<|startofprev|>"),
        return_timestamps=False,
        task_to_id={task: id_of(f"<|{task}|>") for task in _TASKS},
    )
