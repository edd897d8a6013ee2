"""`GGUFSource`: what the translations of GGUF metadata read of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire.models.config.keys import ConfigKeys
from quire.types import ModelError


class GGUFMetadata(Protocol):
    """The part of `Metadata` (gguf.py) that is used here."""

    path: Path

    def get(self, key: str, default: Any = None) -> Any: ...

    def require(self, key: str) -> Any: ...

    def integer(self, key: str, name: str, default: int | None = None) -> int: ...

    def number(self, key: str, name: str, default: float | None = None) -> float: ...


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """The metadata and tensors of one file.

    Attributes:
        arch: the file's architecture.
        meta: its metadata.
        facts: fields of the spec that all architectures have.
        tensors: the tensors by name.
        layers: number of layers, without those that predict several tokens ahead.
    """

    arch: str
    meta: GGUFMetadata
    facts: Mapping[str, Any]
    tensors: Mapping[str, Any]
    layers: int

    def layers_with(self, tensor: str) -> tuple[bool, ...]:
        """Return, for each layer, whether it has the tensor of this name, without the layer's prefix."""
        return tuple(f"blk.{index}.{tensor}" in self.tensors for index in range(self.layers))

    def has(self, tensor: str) -> bool:
        """Return whether a layer has the tensor of this name."""
        return any(self.layers_with(tensor))

    def by_layer(self, key: str, default: Any = None) -> list[Any]:
        """Return the values of a key by layer; a single value counts for all layers.

        Raises:
            ModelError: if the key is missing without a default, or holds too few values.
        """
        found = self.meta.require(key) if default is None else self.meta.get(key, default)
        values = found if isinstance(found, list) else [found] * self.layers
        if len(values) < self.layers:
            raise ModelError(
                f"{self.meta.path}: the metadata key {self.arch if key.startswith('.') else ''}{key} holds "
                f"{len(values)} values for {self.layers} layers"
            )
        return values[: self.layers]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outputs first.

        Raises:
            ModelError: if there is none of this name.
        """
        if tensor not in self.tensors:
            raise ModelError(f"{self.meta.path} has no tensor {tensor}")
        return tuple(int(n) for n in reversed(self.tensors[tensor].shape))

    def integers(self, **keys: str) -> dict[str, int]:
        """Return fields of a config by their keys in the file, which must be there and hold positive integers."""
        return {name: self.meta.integer(key, name) for name, key in keys.items()}

    def quotient(self, key: str, by: int, name: str) -> int:
        """Return the number at `key` divided by `by`.

        Raises:
            ModelError: if it is not a multiple of it; names the field `name`.
        """
        total = self.meta.integer(key, name)
        if total % by:
            raise ConfigKeys({}, f"{self.meta.path}: {self.arch}{key}").refuse(
                name, f"a multiple of {by}", total
            )
        return total // by
