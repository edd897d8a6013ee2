"""The choice of the drafter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.assembly.drafting import DraftLoader
from quire.attention.base import AttentionBackend
from quire.config import EngineConfig
from quire.models.decoder import Model
from quire.models.heads.base import DraftHead
from quire.speculation.draft_model import ModelDrafter
from quire.speculation.drafter import NO_SPECULATION, DraftContext, Drafter, Speculation
from quire.speculation.features import FeatureDrafter, ObservedModel
from quire.speculation.ngram import NgramDrafter
from quire.speculation.suffix import SuffixDrafter


def pick_speculation(config: EngineConfig, loader: DraftLoader) -> Speculation:
    """Return how steps draft tokens.

    Args:
        config: resolved settings.
        loader: loads the network that drafts, for methods that need one.
    """
    return _METHODS[config.spec_method](loader, config.spec_tokens or 0)


def _ngram(loader: DraftLoader, tokens: int) -> Speculation:
    return Speculation(lambda context: NgramDrafter(context.columns, context.device), tokens)


def _suffix(loader: DraftLoader, tokens: int) -> Speculation:
    return Speculation(lambda context: SuffixDrafter(context.columns, context.device), tokens)


def _draft(loader: DraftLoader, tokens: int) -> Speculation:
    model, backend = loader.model()
    return Speculation(lambda context: ModelDrafter(model, backend, context), tokens)


def _head(
    load: Callable[[DraftLoader], tuple[DraftHead, AttentionBackend, int]],
    reads_all: bool,
    loader: DraftLoader,
    tokens: int,
) -> Speculation:
    """Return the drafts of a head.

    Args:
        load: the method of `loader` that builds it.
        reads_all: it reads the last hidden state of every token.
        loader, tokens: see `pick_speculation`.
    """
    head, backend, width = load(loader)

    def make(context: DraftContext) -> Drafter:
        return FeatureDrafter(head, backend, context, tokens, width, loader.dtype)

    def observe(model: Model, drafter: Drafter) -> Model:
        assert isinstance(drafter, FeatureDrafter)
        return ObservedModel(model, drafter.learn, reads_all)

    return Speculation(make, tokens, observe)


_METHODS: dict[str, Callable[[DraftLoader, int], Speculation]] = {
    "off": lambda loader, tokens: NO_SPECULATION,
    "ngram": _ngram,
    "suffix": _suffix,
    "draft": _draft,
    "eagle": partial(_head, DraftLoader.eagle, True),
    "eagle3": partial(_head, DraftLoader.eagle3, False),
    "mtp": partial(_head, DraftLoader.mtp, True),
}
