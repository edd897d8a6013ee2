"""Sources of weights: safetensors files (shards.py), a GGUF file (gguf.py), or random numbers (`DummyCheckpoint`).

Files are memory-mapped, and each layer loads the tensors it needs, so a rank reads only its shard. For a GPU,
threads copy large tensors into place (reader.py) while the rest of the start-up runs. `finish` waits for these
copies. It also reports tensors that no layer loaded, because a model that ignores a weight computes wrong results.
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from quire.layers.env import RowSink, StoredShape
from quire.models.checkpoint.reader import Reader
from quire.models.spec import ModelSpec
from quire.types import ModelError

log = logging.getLogger("quire")

_WHOLE = slice(None)
# Buffers in old checkpoints, and the parts of multimodal models for images and sound.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\battn\.(masked_)?bias$|^(model\.)?(vision_tower|vision_model|vision_encoder|visual|audio_tower"
    r"|multi_modal_projector|mm_projector|embed_vision|embed_audio|vision_adapter|patch_merger)\."
    r"|\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$"
)
# Static scales of keys, values and attention, which a KV cache in 16 bits does not need.
_KV_SCALES = re.compile(r"\.([kvq]|kv|prob)(_cache|_output)?_(scale|zero_point)$|\.[kvq]_proj\.output_scale$")


class Checkpoint(Protocol):
    """`Weights` (layers/env.py) that can be finished and closed."""

    def has(self, name: str) -> bool: ...

    def stored(self, name: str) -> StoredShape | None:
        return None

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor: ...

    def packed(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        return self.tensor(name, shape, rows, cols)

    def stream(
        self,
        sink: RowSink,
        name: str,
        shape: tuple[int, ...],
        rows: slice = _WHOLE,
        cols: slice = _WHOLE,
        *,
        multiple: int = 1,
    ) -> None:
        """Pass a tensor to `sink` at once; readers with threads override this."""
        sink(self.packed(name, shape, rows, cols), 0)

    def when_loaded(self, action: Callable[[], None]) -> None:
        action()

    def copy_into(
        self,
        destination: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        rows: slice = _WHOLE,
        cols: slice = _WHOLE,
    ) -> None:
        """Copy a tensor into `destination`, which is complete when `finish` returns."""
        destination.copy_(self.tensor(name, shape, rows, cols))

    def finish(self) -> None:
        """Wait for all copies, and close the files.

        Raises:
            ModelError: if a tensor of the checkpoint was not loaded, or could not be read; names it.
        """
        ...

    def close(self) -> None:
        """Cancel unfinished copies, and close the files."""
        ...


def open_checkpoint(
    path: Path,
    spec: ModelSpec,
    load_format: str = "auto",
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    skipped: re.Pattern[str] | None = None,
    elsewhere: re.Pattern[str] | None = None,
) -> Checkpoint:
    """Open the weights at `path`.

    Args:
        path: a folder or a .gguf file.
        spec: the model's spec.
        load_format: "auto", or "dummy" for random weights.
        device: the model's device; None: the CPU.
        dtype, seed: dtype and seed of random weights.
        skipped: names of tensors that need not be loaded; None: those of layers behind the last one.
        elsewhere: names of tensors that only other ranks load.

    Raises:
        ModelError: if the weights are missing, damaged, or in a format that is not supported.
    """
    device = device or torch.device("cpu")
    if load_format == "dummy":
        return DummyCheckpoint(seed, device, dtype)
    spec.check_quantization()
    path = Path(path)
    if path.suffix == ".gguf":
        from quire.models.checkpoint.gguf import GGUFCheckpoint  # deferred: most runs need no GGUF reader

        return GGUFCheckpoint(path, spec, elsewhere)
    from quire.models.checkpoint.shards import SafetensorsCheckpoint

    # On a CPU, weights are packed right after reading, so there is nothing to overlap with a reader.
    reader = Reader(device) if device.type == "cuda" else None
    unused = _either(skipped or _unused(spec), elsewhere)
    return SafetensorsCheckpoint(path, spec.tie_embeddings, reader, unused)


def _either(*patterns: re.Pattern[str] | None) -> re.Pattern[str] | None:
    """Return a pattern of the texts that one of `patterns` finds."""
    texts = [pattern.pattern for pattern in patterns if pattern]
    return re.compile("|".join(f"(?:{text})" for text in texts)) if texts else None


def _unused(spec: ModelSpec) -> re.Pattern[str]:
    """Return a pattern of the names of tensors that Quire does not load.

    These are layers that predict several tokens ahead, and the keys and values of layers that read those of another
    layer.
    """
    patterns = [rf"{spec.num_layers + i}\." for i in range(spec.extra_layers)]
    readers = [i for i in range(spec.num_layers) if spec.kv_source(i) != i]
    patterns += [rf"{i}\.self_attn\.[kv]_(proj|norm)\." for i in readers]
    return re.compile(rf"^mtp\.|(^|\.)layers\.({'|'.join(patterns) or '(?!)'})")


def check_shape(name: str, expected: tuple[int, ...], actual: tuple[int, ...]) -> None:
    """Raise ModelError if a tensor's shape is not the one that the config implies."""
    if tuple(actual) != tuple(expected):
        raise ModelError(f"tensor {name} has shape {list(actual)}, but the config asks for {list(expected)}")


def check_unread(unread: set[str], tied: bool) -> None:
    """Raise ModelError if a tensor was not loaded, except for known harmless ones and the head of tied models."""
    left = sorted(
        n
        for n in unread
        if not _HARMLESS.search(n)
        and not _KV_SCALES.search(n)
        and not (tied and n.endswith("lm_head.weight"))
    )
    if any(_KV_SCALES.search(name) for name in unread):
        log.info(
            "the checkpoint has scales of keys, values or queries that are not used; kv_cache_dtype fp8 uses those of "
            "keys and values"
        )
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ModelError(
            f"the checkpoint holds tensors that the model does not use: {', '.join(left[:3])}{more}"
        )


# --------------------------------------------------------------------------------------------- dummy


class DummyCheckpoint(Checkpoint):
    """Random weights of any requested shape, created on the device that will hold them.

    A tensor repeats one block of normal noise, starting at an offset derived from its name. So values depend on seed,
    name and position only, and eight billion of them cost a copy instead of eight billion draws.
    """

    BLOCK = 4_194_301  # prime, so that rows of common widths do not repeat in step with it
    STD = 0.02

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.seed = seed
        noise = torch.randn(self.BLOCK, generator=torch.Generator().manual_seed(seed)) * self.STD
        self.block = noise.to(device, dtype)

    def has(self, name: str) -> bool:
        return True

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        width = math.prod(shape[1:])
        first, last, _ = rows.indices(shape[0])
        flat = self._run(name, first * width, (last - first) * width)
        if len(shape) > 1:
            return flat.view(-1, *shape[1:])[:, cols]
        is_norm = name.endswith(".weight")  # the only one-dimensional weights; the rest are biases
        return flat + 1 if is_norm else flat

    def _run(self, name: str, start: int, length: int) -> torch.Tensor:
        position = (zlib.crc32(name.encode()) + start) % self.BLOCK
        out = torch.empty(length, device=self.block.device, dtype=self.block.dtype)
        done = 0
        while done < length:
            count = min(length - done, self.BLOCK - position)
            out[done : done + count] = self.block[position : position + count]
            done, position = done + count, 0
        return out

    def finish(self) -> None:
        return None

    def close(self) -> None:
        return None
