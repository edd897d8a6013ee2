"""`DraftHead`: the interface of draft heads, and the hidden states of the model that they read.

A head continues pairs of a token and the model's hidden states in front of it: the pair at position i is token i + 1
and the states of position i, from which the model predicted that token. The head predicts token i + 2, and returns a
state of its own, which takes the place of the model's at the next position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from quire.attention.base import ForwardBatch, KVLayer
from quire.layers.residual import Stream
from quire.layers.rope import Rotation
from quire.models.decoder import DecoderModel, Model
from quire.models.layouts import DecoderLayer
from quire.types import ConfigError


class DraftHead(Protocol):
    """A network that drafts tokens from a model's hidden states, with one layer of attention."""

    @property
    def attention_layers(self) -> Sequence[KVLayer]: ...

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the head keeps of the model's states after a step, [tokens, hidden]. `hidden`: the last ones."""
        ...

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Run the head.

        Args:
            hidden: [tokens, hidden], from `combine`, or the head's own of the position before.
            batch: the pairs, with the token ids of the next positions.

        Returns:
            The head's states, of the wanted tokens.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the model's vocabulary, [n, vocab], for states of the head."""
        ...


class TappedLayer:
    """A layer of a model that also keeps its input: the residual stream after the layers before it."""

    tapped = True  # so that steps of few layers run it (models/layer_kinds.py)

    def __init__(self, layer: DecoderLayer) -> None:
        self.attn, self._layer = layer.attn, layer
        self.kept: torch.Tensor  # [tokens, hidden], of the last step

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: ForwardBatch
    ) -> Stream:
        self.kept = x.clone() if residual is None else x + residual
        return self._layer(x, residual, rotation, batch)


def tap(model: Model, indices: Sequence[int], method: str) -> Callable[[], torch.Tensor]:
    """Keep the inputs of some layers in each step. Return a function that concatenates those of the last step.

    Args:
        model: the model that verifies drafts.
        indices: the layers.
        method: the spec_method, for messages.

    Raises:
        ConfigError: if the model has no such layers.
    """
    decoder = decoder_of(model, method)
    count = len(decoder.layers)
    if not all(0 <= index < count for index in indices):
        raise ConfigError(
            f"spec_method {method} reads the hidden states in front of the layers {list(indices)}, but the model has only "
            f"{count} layers; use a draft head that was trained for this model"
        )
    layers: list[Any] = list(decoder.layers)
    for index in set(indices):
        if not isinstance(layers[index], TappedLayer):
            layers[index] = TappedLayer(layers[index])
    decoder.layers, tapped = layers, [layers[index] for index in indices]
    return lambda: torch.cat([layer.kept for layer in tapped], 1)


def decoder_of(model: Model, method: str) -> DecoderModel:
    """Return the model as a decoder whose layers a head can read. Raise ConfigError if it is built otherwise."""
    if not isinstance(model, DecoderModel) or not has_plain_layers(type(model)):
        raise ConfigError(
            f"spec_method {method} needs a decoder with one residual stream and rotary attention, but "
            f"{model.spec.architecture} is another model; use spec_method ngram"
        )
    return model


def has_plain_layers(model_class: object) -> bool:
    """Return whether layers of the model read one residual stream and nothing else, so that a head can read it too."""
    return cast(type, model_class).__call__ is DecoderModel.__call__
