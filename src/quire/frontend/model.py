"""What every client of an engine makes of a model, as the settings say: its tokenizer, and what prepares requests."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.frontend.generation_config import load_generation_defaults
from quire.frontend.location import locate_model, locate_tokenizer
from quire.frontend.processor import InputProcessor
from quire.frontend.tokenizer.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from quire.types import EngineInfo


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """The model's tokenizer, or the one that stands in for it. Raises ModelError."""
    if config.skip_tokenizer_init:
        return NoTokenizer()
    if config.tokenizer is not None:
        return load_tokenizer(locate_tokenizer(config.tokenizer, config.revision))
    return load_tokenizer(locate_model(config.model, config.revision).path)


def processor_of(config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer) -> InputProcessor:
    """For requests to the engine that `info` is of: an answer ends where model or tokenizer say so."""
    return InputProcessor(
        tokenizer,
        info.vocab_size,
        info.max_model_len,
        list(dict.fromkeys([*info.eos_ids, *tokenizer.eos_ids])),
        config.seed,
        load_generation_defaults(locate_model(config.model, config.revision).path),
        info.generates,
    )
