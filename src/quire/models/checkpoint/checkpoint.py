"""Sources of weights: safetensors files, a GGUF file, or random numbers (`DummyCheckpoint`).

Files are memory-mapped, and each layer loads the tensors it needs, so a rank reads only its shard. For a GPU,
threads copy large tensors into place (reader.py) while the rest of the start-up runs. `finish` waits for these
copies. It also reports tensors that no layer loaded, because a model that ignores a weight computes wrong results.
"""

from __future__ import annotations

import json
import logging
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from quire.files.reading import MAX_VOCABULARY_BYTES, check_regular, read_json
from quire.layers.env import RowSink, StoredShape
from quire.models.checkpoint.reader import Reader, StoredTensor
from quire.models.spec import ModelSpec
from quire.types import ModelError

log = logging.getLogger("quire")

_WHOLE = slice(None)
_COMPARED, _BLOCKS = 1 << 22, 64  # a comparison of two tensors reads 2^22 elements, in 64 blocks
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PACKED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # exponents, which are used as integers
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_DTYPES = _FLOATS | _PACKED
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


# --------------------------------------------------------------------------------------- safetensors


class SafetensorsCheckpoint(Checkpoint):
    """One safetensors file, or the shards listed in an index. Without a `reader`, copies are synchronous."""

    def __init__(
        self, folder: Path, tied: bool, reader: Reader | None = None, skipped: re.Pattern[str] | None = None
    ) -> None:
        """Open the files; tensors whose names match `skipped` need not be loaded."""
        self.files: dict[Path, Any] = {}
        self.where: dict[str, Path] = {}
        self.offsets: dict[str, int] = {}  # first byte of a tensor in its file, for the reader
        self.unread: set[str] = set()
        self.tied, self.reader = tied, reader
        self.actions: list[Callable[[], None]] = []  # to run when all tensors are in place
        for file, names in _shards(folder).items():
            handle = self.files[file] = _open(file)
            present = set(handle.keys())
            for name in present if names is None else names:
                if name not in present:
                    raise ModelError(f"{file} lacks tensor {name}, which the index says it holds")
                self.where[name] = file
            if reader:
                self.offsets |= _offsets(file)
        self.unread.update(name for name in self.where if not (skipped and skipped.search(name)))

    def has(self, name: str) -> bool:
        return name in self.where

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        self._find(name, shape, _FLOATS)
        return self.packed(name, shape, rows, cols)

    def stored(self, name: str) -> StoredShape | None:
        if name not in self.where:
            return None
        part = self.files[self.where[name]].get_slice(name)
        return StoredShape(_DTYPES.get(part.get_dtype(), torch.bool), tuple(part.get_shape()))

    def packed(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        part, file = self._find(name, shape, _DTYPES), self.where[name]
        exponents = part.get_dtype() == "F8_E8M0"
        cuts = (rows, cols)[: len(shape)]
        whole = all(cut.indices(size) == (0, size, 1) for cut, size in zip(cuts, shape))
        try:
            values = self.files[file].get_tensor(name) if whole else part[cuts]
            return values.view(torch.uint8) if exponents else values
        except SafetensorError as error:
            raise ModelError(f"cannot read tensor {name} of {file}: {error}") from error

    def copy_into(
        self,
        destination: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        rows: slice = _WHOLE,
        cols: slice = _WHOLE,
    ) -> None:
        # Packed numbers are copied as they are, and only into memory of their dtype.
        dtypes = _FLOATS | {key: dtype for key, dtype in _PACKED.items() if dtype == destination.dtype}
        if self.reader is None:
            self._find(name, shape, dtypes)
            destination.copy_(self.packed(name, shape, rows, cols))
        else:
            self.reader.add(self._locate(name, shape, dtypes), rows, cols, destination)

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
        if self.reader is None:
            super().stream(sink, name, shape, rows, cols)
        else:
            self.reader.stream(self._locate(name, shape, _DTYPES), rows, cols, sink, multiple)

    def when_loaded(self, action: Callable[[], None]) -> None:
        if self.reader is None:
            action()
        else:
            self.actions.append(action)

    def finish(self) -> None:
        check_unread(self.unread, self.tied)
        self._compare_head()
        if self.reader:
            self.reader.finish()
        with torch.inference_mode():
            for action in self.actions:
                action()
        self.close()

    def close(self) -> None:
        self.files.clear()
        self.actions.clear()
        if self.reader:
            self.reader.close()

    def _compare_head(self) -> None:
        """Warn if the checkpoint stores a head that differs from the embedding, although the config ties them."""
        head = next((n for n in self.unread if n.endswith("lm_head.weight")), None)
        table = next((n for n in self.where if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
        if (
            head
            and table
            and not _same_rows(*(self.files[self.where[n]].get_slice(n) for n in (head, table)))
        ):
            log.warning(
                "%s differs from %s, but the config ties them (tie_word_embeddings): the stored head is ignored",
                head,
                table,
            )

    def _locate(self, name: str, shape: tuple[int, ...], dtypes: dict[str, torch.dtype]) -> StoredTensor:
        dtype = dtypes[self._find(name, shape, dtypes).get_dtype()]
        return StoredTensor(name, self.where[name], self.offsets[name], shape, dtype)

    def _find(self, name: str, shape: tuple[int, ...], dtypes: dict[str, torch.dtype]) -> Any:
        """Return the slice of `name`, after checking that it exists with this shape and one of these dtypes."""
        if name not in self.where:
            raise ModelError(f"the checkpoint has no tensor {name} (expected shape {list(shape)})")
        part = self.files[self.where[name]].get_slice(name)
        check_shape(name, shape, tuple(part.get_shape()))
        if part.get_dtype() not in dtypes:
            raise ModelError(
                f"tensor {name} has dtype {part.get_dtype()}, which is not supported; supported are: "
                f"{', '.join(dtypes)}"
            )
        self.unread.discard(name)
        return part


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """Return the safetensors files of a folder, each with the tensors to load from it (None: all)."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is neither a folder nor a .gguf file")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards: dict[Path, list[str] | None] = {}
        for name, file in _weight_map(index).items():
            names = shards.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
        for shard in shards:
            if not shard.exists():
                raise ModelError(f"{index} names {shard.name}, which is missing")
        return shards
    single = folder / "model.safetensors"
    if single.exists():
        return {single: None}
    files = sorted(
        f for f in folder.glob("*.safetensors") if not f.name.startswith(("consolidated", "adapter"))
    )
    if files:
        return dict.fromkeys(files)
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
    if pickles:
        raise ModelError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded and are not "
            "read; convert them to safetensors (load with transformers, then save_pretrained)"
        )
    raise ModelError(f"{folder} holds no weights (*.safetensors)")


def _weight_map(index: Path) -> dict[str, str]:
    files = read_json(index, MAX_VOCABULARY_BYTES).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in files.values()
    ):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    return files


def _open(file: Path) -> Any:
    check_regular(file)
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        if file.stat().st_size > length > MAX_VOCABULARY_BYTES:
            raise ModelError(
                f"{file} has a header of {length} bytes, but the limit is {MAX_VOCABULARY_BYTES}"
            )
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} is not a readable safetensors file; it may be truncated ({error})"
        ) from error


def _offsets(file: Path) -> dict[str, int]:
    """Return the first byte of each tensor in a file whose header has been validated."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _same_rows(one: Any, other: Any) -> bool:
    """Return whether two stored tensors are equal. Of large ones, some blocks of rows are compared.

    That is enough, because a head that was trained separately differs everywhere.
    """
    shape = one.get_shape()
    if shape != other.get_shape():
        return False
    block = max(1, _COMPARED // _BLOCKS // max(1, shape[-1]))
    begins = range(0, shape[0], max(block, shape[0] // _BLOCKS))
    return all(torch.equal(one[i : i + block], other[i : i + block]) for i in begins)


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
