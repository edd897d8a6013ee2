"""Where weights come from: safetensors files, a GGUF file, or thin air (`DummyCheckpoint`).

Files are memory-mapped and layers pull what they need, so a rank reads only its own part. For a GPU,
large tensors are copied into place by threads (reader.py) while the start-up goes on. `finish` waits for them,
and reports tensors that nobody asked for: a model that ignores a weight would be silently wrong.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from quire.files.reading import MAX_VOCABULARY_BYTES, check_regular, read_json
from quire.models.checkpoint.reader import Reader, StoredTensor
from quire.models.spec import ModelSpec
from quire.types import ModelError

log = logging.getLogger("quire")

_WHOLE = slice(None)
_COMPARED, _BLOCKS = 1 << 22, 64  # elements of two tensors that are compared, in so many blocks
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Buffers that old checkpoints carry along, and the vision half of Gemma 3.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\battn\.(masked_)?bias$|^(model\.)?(vision_tower|multi_modal_projector)\."
)


class Checkpoint(Protocol):
    """`Weights` (layers/env.py) with an end."""

    def has(self, name: str) -> bool: ...

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor: ...

    def copy_into(
        self,
        destination: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        rows: slice = _WHOLE,
        cols: slice = _WHOLE,
    ) -> None:
        """`destination[...] = tensor(...)`, until `finish` at the latest."""
        destination.copy_(self.tensor(name, shape, rows, cols))

    def finish(self) -> None:
        """Wait for all copies. Raise ModelError naming tensors that were never read or could not be."""
        ...

    def close(self) -> None:
        """Give up what is not finished, and close the files."""
        ...


def open_checkpoint(
    path: Path,
    spec: ModelSpec,
    load_format: str = "auto",
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Checkpoint:
    """The weights at `path`, a folder or a .gguf file, for a model on `device`.

    dtype and seed are for dummy weights only.
    """
    device = device or torch.device("cpu")
    if load_format == "dummy":
        return DummyCheckpoint(seed, device, dtype)
    spec.check_quantization()
    path = Path(path)
    if path.suffix == ".gguf":
        from quire.models.checkpoint.gguf import GGUFCheckpoint  # here: most runs need no GGUF reader

        return GGUFCheckpoint(path, spec)
    # A CPU's weights are packed as soon as they are there: nothing could go on beside a reader.
    reader = Reader(device) if device.type == "cuda" else None
    return SafetensorsCheckpoint(path, spec.tie_embeddings, reader)


# --------------------------------------------------------------------------------------- safetensors


class SafetensorsCheckpoint(Checkpoint):
    """One file, or the shards that an index names. Without a `reader`, copies are made at once."""

    def __init__(self, folder: Path, tied: bool, reader: Reader | None = None) -> None:
        self.files: dict[Path, Any] = {}
        self.where: dict[str, Path] = {}
        self.offsets: dict[str, int] = {}  # of a tensor in its file; for the reader
        self.unread: set[str] = set()
        self.tied, self.reader = tied, reader
        for file, names in _shards(folder).items():
            handle = self.files[file] = _open(file)
            present = set(handle.keys())
            for name in present if names is None else names:
                if name not in present:
                    raise ModelError(f"{file} lacks tensor {name}, which the index says it holds")
                self.where[name] = file
            if reader:
                self.offsets |= _offsets(file)
        self.unread.update(self.where)

    def has(self, name: str) -> bool:
        return name in self.where

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = _WHOLE, cols: slice = _WHOLE
    ) -> torch.Tensor:
        part, file = self._find(name, shape), self.where[name]
        cuts = (rows, cols)[: len(shape)]
        whole = all(cut.indices(size) == (0, size, 1) for cut, size in zip(cuts, shape))
        try:
            return self.files[file].get_tensor(name) if whole else part[cuts]
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
        if self.reader is None:
            super().copy_into(destination, name, shape, rows, cols)
            return
        dtype = _FLOATS[self._find(name, shape).get_dtype()]
        stored = StoredTensor(name, self.where[name], self.offsets[name], shape, dtype)
        self.reader.add(stored, rows, cols, destination)

    def finish(self) -> None:
        check_unread(self.unread, self.tied)
        self._compare_head()
        if self.reader:
            self.reader.finish()
        self.close()

    def close(self) -> None:
        self.files.clear()
        if self.reader:
            self.reader.close()

    def _compare_head(self) -> None:
        """Warn if a head that is stored, but not used because it is tied, is not the embedding."""
        head = next((n for n in self.unread if n.endswith("lm_head.weight")), None)
        table = next((n for n in self.where if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
        if (
            head
            and table
            and not _same_rows(*(self.files[self.where[n]].get_slice(n) for n in (head, table)))
        ):
            log.warning(
                "%s differs from %s, but the config ties them (tie_word_embeddings): the stored head is not used",
                head,
                table,
            )

    def _find(self, name: str, shape: tuple[int, ...]) -> Any:
        """The slice of `name`, which must be there, in this shape and in numbers that can be read."""
        if name not in self.where:
            raise ModelError(f"the checkpoint has no tensor {name} (expected shape {list(shape)})")
        part = self.files[self.where[name]].get_slice(name)
        check_shape(name, shape, tuple(part.get_shape()))
        if part.get_dtype() not in _FLOATS:
            raise ModelError(f"tensor {name} has dtype {part.get_dtype()}, which is not supported")
        self.unread.discard(name)
        return part


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder, each with the tensors to take from it (None: all)."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder and no .gguf file")
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
    found = read_json(index, MAX_VOCABULARY_BYTES).get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in found.values()
    ):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    return found


def _open(file: Path) -> Any:
    check_regular(file)
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        if file.stat().st_size > length > MAX_VOCABULARY_BYTES:
            raise ModelError(
                f"{file} has a header of {length} bytes, but at most {MAX_VOCABULARY_BYTES} are read"
            )
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file} is not a readable safetensors file, perhaps cut short ({error})") from error


def _offsets(file: Path) -> dict[str, int]:
    """Where in a file, which has been opened and found sound, each tensor begins."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _same_rows(one: Any, other: Any) -> bool:
    """Whether two stored tensors are equal, in some blocks of rows where there are many: a head that was trained
    on its own differs everywhere."""
    shape = one.get_shape()
    if shape != other.get_shape():
        return False
    block = max(1, _COMPARED // _BLOCKS // max(1, shape[-1]))
    begins = range(0, shape[0], max(block, shape[0] // _BLOCKS))
    return all(torch.equal(one[i : i + block], other[i : i + block]) for i in begins)


def check_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if tuple(found) != tuple(expected):
        raise ModelError(f"tensor {name} has shape {list(found)}, but the config asks for {list(expected)}")


def check_unread(unread: set[str], tied: bool) -> None:
    left = sorted(
        n for n in unread if not _HARMLESS.search(n) and not (tied and n.endswith("lm_head.weight"))
    )
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ModelError(
            f"the checkpoint holds tensors that the model does not use: {', '.join(left[:3])}{more}"
        )


# --------------------------------------------------------------------------------------------- dummy


class DummyCheckpoint(Checkpoint):
    """Random weights in whatever shape is asked for, made on the device that will hold them.

    A tensor repeats one block of normal noise from an offset that its name decides, so the values depend
    on seed, name and position alone, and eight billion of them cost a copy, not eight billion draws.
    """

    BLOCK = 4_194_301  # prime: rows of no usual width repeat in step with it
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
        width = shape[1] if len(shape) > 1 else 1
        first, last, _ = rows.indices(shape[0])
        flat = self._run(name, first * width, (last - first) * width)
        if len(shape) > 1:
            return flat.view(-1, width)[:, cols]
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
