"""The choice of the drafter, and the draft model if it needs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from quire.attention.base import AttentionBackend
from quire.config import EngineConfig
from quire.frontend.location import locate_model
from quire.models.config.load import load_spec
from quire.models.decoder import Model
from quire.models.spec import ModelSpec
from quire.speculation.draft_model import ModelDrafter
from quire.speculation.drafter import NO_SPECULATION, Speculation
from quire.speculation.ngram import NgramDrafter
from quire.speculation.vocabulary import check_vocabulary
from quire.types import ConfigError


class DraftSource(NamedTuple):
    """The draft model of an engine."""

    path: Path
    spec: ModelSpec


def find_draft(config: EngineConfig, path: Path, spec: ModelSpec) -> list[DraftSource]:
    """Return the draft model, if the settings name one.

    Args:
        path: folder or file of the model that verifies.
        spec: its spec.

    Raises:
        ConfigError: if the draft model has another vocabulary, a shorter context than `config` demands, or states.
    """
    if config.spec_model is None:
        return []
    draft = DraftSource(found := locate_model(config.spec_model).path, load_spec(found))
    if spec.kv_codes:
        draft = draft._replace(spec=replace(draft.spec, kv_codes=replace(spec.kv_codes, static=False)))
    if any(draft.spec.mixes):
        raise ConfigError(
            f"spec_model {config.spec_model} is a {draft.spec.architecture} whose layers keep states, which rejected "
            "drafts would spoil; use a draft model that only attends, or spec_method ngram"
        )
    check_vocabulary(path, spec.vocab_size, draft.path, draft.spec.vocab_size)
    if (config.max_model_len or 0) > draft.spec.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {draft.spec.max_model_len} positions of the draft model "
            f"{config.spec_model}; lower it or use another spec_model"
        )
    return [draft]


def pick_speculation(
    config: EngineConfig, load_draft: Callable[[], tuple[Model, AttentionBackend]]
) -> Speculation:
    """Return how steps draft tokens.

    Args:
        config: resolved settings.
        load_draft: loads the draft model, for methods that need one.
    """
    tokens = config.spec_tokens or 0
    if config.spec_method == "ngram":
        return Speculation(lambda context: NgramDrafter(context.columns, context.device), tokens)
    if config.spec_method == "draft":
        model, backend = load_draft()
        return Speculation(lambda context: ModelDrafter(model, backend, context), tokens)
    return NO_SPECULATION
