"""StableLM 2 (arXiv:2402.17834)."""

from __future__ import annotations

from quire.models.config.keys import ConfigKeys
from quire.models.config.parts import decoder_spec
from quire.models.config.rope import RopeDefaults
from quire.models.families import Family, names
from quire.models.spec import ModelSpec
from quire.types import ModelError


def _parse(name: str, keys: ConfigKeys) -> ModelSpec:
    if keys.flag("qk_layernorm"):
        raise ModelError(f"{name} with qk_layernorm is not supported")
    return decoder_spec(
        name,
        "stablelm",
        keys,
        eps=1e-5,
        eps_key="layer_norm_eps",
        rope=RopeDefaults(partial=0.25),
        qkv_bias=keys.flag("use_qkv_bias"),
        layout="parallel" if keys.flag("use_parallel_residual") else "pre",
        norm="layer",
    )


FAMILY = Family(
    title="StableLM 2",
    architectures=names("StableLm", "stablelm"),
    parse=_parse,
    special="LayerNorm, rotation of a quarter of a head",
    gguf=("stablelm",),
)
