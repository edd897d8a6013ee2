"""The text side of a model, built from the settings: its tokenizer and the processor of its requests."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.frontend.generation_config import load_generation_defaults
from quire.frontend.location import locate_model, locate_tokenizer
from quire.frontend.processor import InputProcessor
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from quire.types import EngineInfo


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer that the settings name, or a `NoTokenizer` with `skip_tokenizer_init`.

    Raises:
        ModelError: if it cannot be found or read.
    """
    if config.skip_tokenizer_init:
        return NoTokenizer()
    if config.tokenizer is not None:
        return load_tokenizer(locate_tokenizer(config.tokenizer, config.revision))
    return load_tokenizer(locate_model(config.model, config.revision).path)


def processor_of(config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer) -> InputProcessor:
    """Build the processor of requests to an engine.

    Args:
        config: the engine's settings.
        info: what the engine reports about its model. Answers end at its end-of-sequence ids and at the tokenizer's.
        tokenizer: the model's tokenizer.
    """
    return InputProcessor(
        tokenizer,
        info.vocab_size,
        info.max_model_len,
        list(dict.fromkeys([*info.eos_ids, *tokenizer.eos_ids])),
        config.seed,
        load_generation_defaults(locate_model(config.model, config.revision).path),
        info.generates,
    )
