"""`SafetensorsCheckpoint`: weights in one safetensors file, or in the shards that an index lists."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.files.reading import MAX_VOCABULARY_BYTES, check_reachable, check_regular, read_json
from quire.layers.env import RowSink, StoredShape
from quire.models.checkpoint.checkpoint import Checkpoint, check_shape, check_unread
from quire.models.checkpoint.reader import Reader, StoredTensor
from quire.types import ModelError

log = logging.getLogger("quire")

_LFS_POINTER = b"version https://git-lfs"  # first bytes of the file that stands for another
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
        # Packed numbers are copied without conversion, so the memory must have their dtype.
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
            check_reachable(shard)
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
        isinstance(f, str) and f and Path(f).name == f for f in files.values()
    ):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    return files


def _open(file: Path) -> Any:
    check_regular(file)
    try:
        with file.open("rb") as opened:
            head = opened.read(len(_LFS_POINTER))
        if head == _LFS_POINTER:
            raise ModelError(f"{file} is a pointer of Git LFS to the weights; fetch them with git lfs pull")
        length = int.from_bytes(head[:8], "little")
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
