"""The decoder that most models share: rotary attention and an MLP in each layer, one residual stream.

Families differ in the fields of `ModelSpec`, which this module and layouts.py read; the file of a family contains only
its differences. The residual is passed along with x, so that every addition can be fused with the norm behind it.
Weight names are those of Llama's checkpoints, or what `ModelSpec.names` maps them to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.attention.base import ForwardBatch, KVLayer
from quire.layers.embedding import Embedding, LMHead
from quire.layers.env import Env, Weights
from quire.layers.norm import NORMS, Norm
from quire.layers.rope import Rope
from quire.models.layouts import LAYOUTS, DecoderLayer
from quire.models.spec import ModelSpec

# Of text-only checkpoints, of multimodal ones in two spellings, and of both without a head.
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "backbone.", "")


@dataclass(frozen=True, slots=True)
class BriefSteps:
    """Decode steps that a model runs in another way than others: their captured steps are apart from those."""

    rows: int = 0  # most rows, of one token each; 0: there are no such steps
    tokens: int = 0  # most KV entries of all rows together

    def has(self, rows: int, tokens: int) -> bool:
        """Return whether a decode step of `rows` rows with contexts of `tokens` tokens in all is one of them."""
        return rows <= self.rows and tokens <= self.tokens


NO_BRIEF_STEPS = BriefSteps()


class Model(Protocol):
    """A model as the worker uses it."""

    spec: ModelSpec

    @property
    def attention_layers(self) -> Sequence[KVLayer]:
        """Layers with keys and values, by index."""
        ...

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Run the model on a step, and write its keys and values to `batch.kv_slots`.

        Returns:
            Hidden states [tokens, hidden], or [wanted, hidden] if `batch.wanted` is set. Before the last stage of a
            pipeline: the states that the next stage needs, [tokens, hidden].
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] of hidden states [n, hidden]. Only the last stage of a pipeline can."""
        ...


class DecoderModel:
    """Embedding, layers, final norm, head. Layers have the class `layer_class`, or that of the spec's layout.

    A stage of a pipeline has its layers only, the first one the embedding, and the last one norm and head.
    """

    layer_class: type[DecoderLayer] | None = None
    embed: Embedding
    norm: Norm
    head: LMHead

    def __init__(self, env: Env, spec: ModelSpec) -> None:
        table = spec.names.get("embed_tokens", "embed_tokens")
        prefix = find_prefix(env.weights, table + ".weight", PREFIXES)
        self.spec, self.prefix, self.stage = spec, prefix, env.stage
        if self.stage.is_first or (self.stage.is_last and spec.tie_embeddings):
            self.embed = Embedding(
                env,
                prefix + table,
                spec.vocab_size,
                spec.hidden_size,
                spec.embedding_scale,
                spec.rounds_embedding_scale,
            )
        kinds = [(params, spec.rope_dim(index)) for index, params in enumerate(spec.layer_ropes)]
        different = list(dict.fromkeys(kinds))
        self.ropes = [Rope(*kind, spec.max_model_len, env.device, env.dtype) for kind in different]
        own = self.stage.layers(spec.num_layers)
        self.rope_of = [different.index(kinds[index]) for index in own]
        layer_class = self.layer_class or LAYOUTS[spec.layout]
        self.layers: Sequence[DecoderLayer] = [layer_class(env, spec, i, f"{prefix}layers.{i}.") for i in own]
        attention = (layer.attn.attention for layer in self.layers)
        self.attention_layers = [layer for layer in attention if layer is not None]
        if self.stage.is_last:
            self.load_end(env, prefix)

    def load_end(self, env: Env, prefix: str) -> None:
        """Load the final norm and the head."""
        spec, norm = self.spec, NORMS[self.spec.norm]
        self.norm = norm(env, prefix + spec.names.get("norm", "norm"), spec.hidden_size, spec.norm_eps)
        self.head = LMHead(
            env,
            find_prefix(env.weights, "lm_head.weight", ("", "language_model.")) + "lm_head",
            spec.hidden_size,
            spec.vocab_size,
            self.embed if spec.tie_embeddings else None,
            spec.final_soft_cap,
            spec.logit_scale,
            spec.head_bias,
        )

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        rotations = [rope.lookup(batch.positions) for rope in self.ropes]
        x = self.embed(batch.input_ids) if self.stage.is_first else self.stage.entered(len(batch.input_ids))
        residual: torch.Tensor | None = None
        for layer, rope in zip(self.layers, self.rope_of):
            x, residual = layer(x, residual, rotations[rope], batch)
        return self.norm(x, residual)[0] if self.stage.is_last else self.stage.hand_over(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def find_prefix(weights: Weights, name: str, prefixes: tuple[str, ...]) -> str:
    """Return the first of `prefixes` under which the checkpoint has `name`.

    If none does, return the first one, so that the missing tensor is reported under its usual name.
    """
    return next((prefix for prefix in prefixes if weights.has(prefix + name)), prefixes[0])
