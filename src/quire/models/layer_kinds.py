"""The kinds of layers of a model, for steps that only have to launch every kernel once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.models.spec import ModelSpec

_OF_EACH = 2  # the first layer fuses less with the layer in front of it than the others


def layer_kinds(spec: ModelSpec) -> list[Hashable]:
    """Return, for each layer of a model, what tells its kernels apart from those of other layers."""
    ropes = (None,) * spec.num_layers if spec.rope is None else spec.layer_ropes
    dtype = "bfloat16"  # any: all layers have the same
    return list(zip(spec.layer_parameters, spec.kv_layouts(dtype), spec.state_layouts(dtype), ropes))


@contextmanager
def few_layers(model: Any) -> Iterator[None]:
    """Let a model run only two layers of each kind, and its last layer, in this context.

    For steps whose results are not used: they launch the same kernels as with all layers, in a fraction of the time.
    Layers that draft heads read (`TappedLayer`) stay too. A model without a list `layers` runs whole. Of a model that
    wraps one with layers, in `layer_by_layer`, that one runs few.
    """
    model = getattr(model, "layer_by_layer", model)
    layers = getattr(model, "layers", None)
    if layers is None:
        yield
        return
    kinds, seen = layer_kinds(model.spec), Counter[Hashable]()
    kept = []
    for place, index in enumerate(model.stage.layers(model.spec.num_layers)):
        seen[kinds[index]] += 1
        read = getattr(layers[place], "tapped", False)
        if read or seen[kinds[index]] <= _OF_EACH or place == len(layers) - 1:
            kept.append(place)
    whole = {name: getattr(model, name) for name in ("layers", "rope_of") if hasattr(model, name)}
    for name, parts in whole.items():
        setattr(model, name, [parts[place] for place in kept])
    try:
        yield
    finally:
        for name, parts in whole.items():
            setattr(model, name, parts)
