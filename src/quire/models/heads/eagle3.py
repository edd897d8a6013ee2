r"""EAGLE-3 (arXiv:2503.01840): a draft head that reads the hidden states of three layers.

    states of three layers -> fc ----------+--------------- + attention -+- + MLP - state -> norm -> lm_head
                                           | hidden_norm \\                |
    next token -> embedding -> input_layernorm -> (concatenated) ---------+

Public checkpoints have the layout of the authors' repository: `fc`, `midlayer`, `norm`, and an `lm_head` over a part of
the vocabulary, whose rows `d2t` maps to the model's token ids. `embed_tokens` is the model's if it is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.attention.base import ForwardBatch, KVLayer
from quire.layers.attention import Attention, rotary_attention
from quire.layers.embedding import Embedding
from quire.layers.env import Env
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.part_vocabulary import PartVocabulary
from quire.layers.residual import NormedLayer, ResidualAdd
from quire.layers.rope import Rope
from quire.models.decoder import find_prefix
from quire.models.spec import ModelSpec
from quire.types import ConfigError

PREFIXES = ("", "model.")
UNREAD = re.compile(r"^(model\.)?t2d$")  # the inverse of d2t
LAYERS = ("midlayer.", "layers.0.")  # of the authors' checkpoints, and of vLLM's speculators


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """The configuration of an EAGLE-3 head."""

    layer: ModelSpec  # sizes of its layer; the vocabulary is the model's
    draft_vocab: int  # rows of its lm_head
    taps: tuple[int, ...]  # layers of the model in front of which the hidden states are read
    target_hidden: int  # width of these
    normed_residual: bool = False  # whether the residual stream begins behind hidden_norm

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the matrices. The embedding counts if it cannot be the model's."""
        layer, hidden = self.layer, self.layer.hidden_size
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        attention = 2 * hidden * (queries + 2 * keys) + queries * hidden
        vocab = self.draft_vocab + (layer.vocab_size if hidden != self.target_hidden else 0)
        body = len(self.taps) * self.target_hidden + 3 * layer.intermediate_size + vocab
        return attention + hidden * body


class Eagle3Head:
    """A `DraftHead` with the weights of an EAGLE-3 checkpoint.

    Args:
        env: the weights, and what layers are built with.
        spec: its configuration.
        embed: the embedding of the model, for checkpoints without one.
        features: returns the hidden states of the last step that it reads, [tokens, taps * hidden].
    """

    def __init__(
        self, env: Env, spec: Eagle3Spec, embed: Embedding, features: Callable[[], torch.Tensor]
    ) -> None:
        layer, self.features, self._spec = spec.layer, features, spec
        hidden, dim = layer.hidden_size, layer.head_dim
        root = find_prefix(env.weights, "fc.weight", PREFIXES)
        middle = (
            root
            + find_prefix(env.weights, "self_attn.q_proj.weight", tuple(root + p for p in LAYERS))[
                len(root) :
            ]
        )
        self.embed = self._embedding(env, root, layer, embed)
        self.fc = Linear(env, root + "fc", len(spec.taps) * spec.target_hidden, hidden)
        self.input_norm = RMSNorm(env, middle + "input_layernorm", hidden, layer.norm_eps)
        self.hidden_norm = RMSNorm(env, middle + "hidden_norm", hidden, layer.norm_eps)
        self.rope = Rope(layer.layer_ropes[0], layer.rope_dim(0), layer.max_model_len, env.device, env.dtype)
        names = [f"{middle}self_attn.{name}_proj" for name in "qkv"]
        outs = [layer.num_heads * dim, layer.num_kv_heads * dim, layer.num_kv_heads * dim]
        self.qkv = Linear(env, names, 2 * hidden, outs, layer.qkv_bias)
        attention = Attention(
            env,
            0,
            layer.num_heads,
            layer.kv_layout(0, env.dtype_name),
            layer.query_scale,
            span=layer.layer_ropes[0].span(dim),
        )
        self.attend = rotary_attention(attention, None, env.kernels)
        self.o = ResidualAdd(Linear(env, middle + "self_attn.o_proj", outs[0], hidden, layer.o_bias))
        post_norm = RMSNorm(env, middle + "post_attention_layernorm", hidden, layer.norm_eps)
        mlp = GatedMLP(
            env, middle + "mlp.", hidden, layer.intermediate_size, layer.activation, layer.mlp_bias
        )
        self.mlp = NormedLayer(post_norm, mlp, adds=True)
        norm = RMSNorm(env, root + "norm", hidden, layer.norm_eps)
        name = find_prefix(env.weights, "lm_head.weight", PREFIXES) + "lm_head"
        self.head = NormedLayer(norm, Linear(env, name, hidden, spec.draft_vocab))
        self._spread = self._vocabulary(env)
        self.attention_layers: Sequence[KVLayer] = [attention]

    @staticmethod
    def _embedding(env: Env, root: str, layer: ModelSpec, embed: Embedding) -> Embedding:
        if env.weights.has(root + "embed_tokens.weight"):
            return Embedding(env, root + "embed_tokens", layer.vocab_size, layer.hidden_size)
        if (width := embed.weight.shape[1]) != layer.hidden_size:
            raise ConfigError(
                f"the draft head has no embed_tokens, and its hidden size {layer.hidden_size} differs from the model's "
                f"{width}; use a draft head that was trained for this model"
            )
        return embed

    def _token_ids(self, env: Env) -> torch.Tensor | None:
        """Return the model's token id of each row of the head, int64 [draft vocab]; None if they are equal."""
        count = self._spec.draft_vocab
        name = next((p + "d2t" for p in PREFIXES if env.weights.has(p + "d2t")), None)
        if name is None:
            if count != self._spec.layer.vocab_size:
                raise ConfigError(
                    f"the draft head has {count} tokens and no d2t, which maps them to the model's "
                    f"{self._spec.layer.vocab_size}; use a complete checkpoint"
                )
            return None
        ids = env.weights.packed(name, (count,)).cpu().long() + torch.arange(count)
        vocab = self._spec.layer.vocab_size
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ConfigError(
                f"d2t of the draft head maps to token ids from {int(ids.min())} to {int(ids.max())}, but the model has "
                f"{vocab}; use a draft head that was trained for this model"
            )
        return ids.to(env.device)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(self.features())

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        normed = self.hidden_norm.alone(hidden)
        x = torch.cat([self.input_norm.alone(self.embed(batch.input_ids)), normed], 1)
        x = self.attend(self.qkv(x), self.rope.lookup(batch.positions), batch)
        x, residual = batch.narrow(x, normed if self._spec.normed_residual else hidden)
        x, rest = self.mlp(*self.o(x, residual))
        return x if rest is None else x + rest

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._spread(self.head(hidden, None)[0])

    def _vocabulary(self, env: Env) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that maps logits of the head's rows to logits over the model's vocabulary."""
        ids, vocab = self._token_ids(env), self._spec.layer.vocab_size
        if ids is None:
            return lambda logits: logits
        return PartVocabulary(ids, vocab)
