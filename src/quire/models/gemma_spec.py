"""`GemmaSpec`: what only Gemma 3n and Gemma 4 have. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSpec:
    """Per-layer embeddings, values made of keys, and the streams of Gemma 3n.

    Attributes:
        layer_width: width of the embedding that each layer gets of a token; 0: there is none.
        layer_vocab: rows of the table of these embeddings; ids behind it have those of id 0.
        keys_as_values: layers whose values are their keys before norm and rotation.
        streams: number of residual streams that are predicted and corrected (AltUp); 1: plain residuals.
        active_stream: the stream that the layers compute.
        scales_correction: whether the corrected active stream is scaled before it meets the layer's embedding.
        laurel_rank: rank of the learned residual of attention (LAuReL).
        sparsity: by layer, the share of the gates of its MLP that are cut to 0; empty: none.
    """

    layer_width: int = 0
    layer_vocab: int = 0
    keys_as_values: tuple[int, ...] = ()
    streams: int = 1
    active_stream: int = 0
    scales_correction: bool = False
    laurel_rank: int = 0
    sparsity: tuple[float, ...] = ()

    def num_parameters(self, hidden: int, layers: int) -> int:
        """Return the number of parameters of the matrices that other models do not have."""
        embeddings = layers * self.layer_width * (self.layer_vocab + 3 * hidden)
        streams = 2 * (self.streams - 1) * hidden * hidden
        routers = layers * self.streams * (hidden + self.streams + self.streams**2) if self.streams > 1 else 0
        return embeddings + streams + routers + layers * 2 * self.laurel_rank * hidden
