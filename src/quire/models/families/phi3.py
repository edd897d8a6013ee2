"""Phi-3 (arXiv:2404.14219) and Phi-4, Phi-4-mini (arXiv:2503.01743)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec, optional_window
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    return decoder_spec(
        name,
        "phi3",
        keys,
        window=optional_window(keys),
        eps=1e-5,
        rope=RopeDefaults(partial=1.0),
        fused_qkv=True,
        fused_gate_up=True,
    )


FAMILY = Family(
    title="Phi-3, Phi-3.5, Phi-4",
    architectures=names("Phi3", "phi3"),
    parse=_parse,
    special="fused projections in the checkpoint, partial rotation, longrope",
    gguf=("phi3",),
    tools="phi4",
)
