"""The choice between absorbed and expanded latents for rows of prompts."""

from __future__ import annotations

import torch

from quire.attention.base import AttentionBackend
from quire.attention.expanded_reference import ExpandedReference
from quire.attention.expanding import ExpandingAttention
from quire.attention.expansion_rule import GPU_LEAST_SAVED, NO_EXPANSION, ExpansionRule
from quire.models.spec import ModelSpec
from quire.types import ConfigError

PIECE_BYTES = 64 << 20  # of expanded keys and values that exist at once


def with_expansion(
    absorbed: AttentionBackend,
    way: str,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int,
    least_saved: float | None = None,
) -> AttentionBackend:
    """Return a back end in which long rows expand latents, or `absorbed` itself if none do.

    Args:
        absorbed: the back end of all other rows.
        way: `absorbed`, `expanded`, or `auto`, which expands unless an indexer chooses the tokens.
        spec: the model.
        device: where the model runs.
        dtype: of its activations.
        ranks: among which the heads are divided.
        least_saved: multiply-adds that a row must save (`ExpansionRule`); None: what a lost capture costs.

    Raises:
        ConfigError: if the model does not compute what `way` asks for.
    """
    rule = expansion_rule(way, spec, device, ranks, least_saved)
    if rule is NO_EXPANSION:
        return absorbed
    if absorbed.name != "triton":
        return ExpandingAttention(absorbed, ExpandedReference(), rule)
    # Imported here: an installation for CPUs has no Triton.
    from quire.attention.expanded_triton import ExpandedSizes, ExpandedTriton

    latent = spec.latent
    assert latent is not None
    sizes = ExpandedSizes(rule.heads, latent.content_dim, latent.rotary_dim, latent.value_dim, dtype.itemsize)
    return ExpandingAttention(absorbed, ExpandedTriton(sizes, PIECE_BYTES), rule)


def expansion_rule(
    way: str, spec: ModelSpec, device: torch.device, ranks: int, least_saved: float | None = None
) -> ExpansionRule:
    """Return which rows expand latents; NO_EXPANSION if none do. For arguments and errors see `with_expansion`."""
    latent = spec.latent
    if latent is None:
        raise ConfigError(
            f"prefill_attention {way} needs latent attention, which {spec.architecture} has not; use auto"
        )
    if way == "expanded" and latent.index:
        raise ConfigError(
            f"prefill_attention expanded reads all tokens, but {spec.architecture} chooses them for each query; "
            "use absorbed"
        )
    if way == "absorbed" or latent.index:
        return NO_EXPANSION
    heads = spec.num_heads // ranks
    if least_saved is None:
        least_saved = GPU_LEAST_SAVED if device.type == "cuda" else 0.0
    return ExpansionRule(
        heads, latent.rank, latent.content_dim, latent.value_dim, least_saved, scratch_bytes=PIECE_BYTES
    )
