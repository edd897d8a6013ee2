"""`quantise_checkpoint`: write a quantised copy of a folder of plain safetensors files, file by file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from quire.files.reading import read_json
from quire.models.checkpoint.shards import SafetensorsCheckpoint
from quire.models.config.load import load_spec
from quire.quant.export import describe, export_weight
from quire.quant.spec import Conversion
from quire.types import ModelError

# Matrices of layers that are quantised: all but routers. Heads and embeddings are outside of the layers.
_LAYER = re.compile(r"(^|\.)layers\.\d+\..*\.weight$")
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_MIN_GROUP = 16
# Receives the name of each tensor that is done.
Progress = Callable[[str], None]


def matrices_of(folder: Path) -> list[str]:
    """Return the names of the matrices that `quantise_checkpoint` would quantise.

    Raises:
        ModelError: if the checkpoint cannot be read, is quantised, or has no such matrices.
    """
    spec = load_spec(folder)
    if spec.quantization:
        raise ModelError(
            f"{folder} is quantised already ({spec.quantization}); quantise the plain checkpoint"
        )
    if spec.family == "gpt2":
        raise ModelError(
            "GPT-2 stores its matrices [inputs, outputs], which quantised formats do not support"
        )
    checkpoint = SafetensorsCheckpoint(folder, tied=True)
    shapes = {name: found.shape for name in checkpoint.where if (found := checkpoint.stored(name))}
    checkpoint.close()
    stacked = next((n for n, shape in shapes.items() if len(shape) == 3 and "experts" in n), None)
    if stacked:
        raise ModelError(
            f"{stacked} stacks the matrices of all experts, which compressed-tensors does not; this is not supported"
        )
    matrices = [
        n for n, shape in shapes.items() if len(shape) == 2 and _LAYER.search(n) and not _ROUTER.search(n)
    ]
    if not matrices:
        raise ModelError(f"{folder} holds no matrices of layers to quantise")
    return matrices


def quantise_checkpoint(
    folder: Path,
    out: Path,
    form: Conversion,
    group_size: int,
    device: torch.device,
    progress: Progress = lambda name: None,
    calibrated: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> None:
    """Write a copy of the checkpoint in `folder` to `out`, with the matrices of its layers in `form`.

    Files keep their names, and one file is in memory at a time. Everything else in the folder is copied.

    Args:
        folder: config.json and safetensors files with plain weights.
        out: the new folder, which must be empty or missing.
        form: the format.
        group_size: columns with a common scale, for int4.
        device: where numbers are rounded.
        progress: called after each matrix.
        calibrated: tensors of matrices that are quantised already, by their names (calibrate.py).

    Raises:
        ModelError: if the checkpoint cannot be read or written in this format.
    """
    wanted = set(matrices_of(folder))
    check_new(folder, out, form, group_size)
    try:
        _write_copy(folder, out, wanted, form, group_size, device, progress, calibrated or {})
    except (OSError, SafetensorError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        advice = "; what it holds is not complete, so delete it" if out.is_dir() else ""
        raise ModelError(f"{out} cannot be written: {reason}{advice}") from error


def _write_copy(
    folder: Path,
    out: Path,
    wanted: set[str],
    form: Conversion,
    group_size: int,
    device: torch.device,
    progress: Progress,
    calibrated: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Write the files of `quantise_checkpoint`, the config last: a folder without it is no model, so none is half done."""
    checkpoint = SafetensorsCheckpoint(folder, tied=True)
    plain = [
        n for n in checkpoint.where if n not in wanted and (_ROUTER.search(n) or n.endswith("lm_head.weight"))
    ]
    ignored = ["lm_head", *(n.removesuffix(".weight") for n in plain if not n.endswith("lm_head.weight"))]
    out.mkdir(parents=True, exist_ok=True)
    placed: dict[str, str] = {}
    size = 0
    for file in sorted(checkpoint.files):
        tensors: dict[str, torch.Tensor] = {}
        for name in (n for n, where in checkpoint.where.items() if where == file):
            stored = checkpoint.stored(name)
            assert stored is not None
            values = checkpoint.packed(name, stored.shape)
            if name not in wanted:
                tensors[name] = values
                continue
            exported = calibrated.get(name)
            if exported is None:
                exported = export_weight(values.to(device), form, group_size)
                progress(name)
            module = name.removesuffix("weight")
            tensors |= {module + end: tensor.cpu().contiguous() for end, tensor in exported.items()}
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    checkpoint.close()
    if (folder / _INDEX).exists():
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _copy_others(folder, out)
    config = read_json(folder / "config.json") | {"quantization_config": describe(form, group_size, ignored)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_new(folder: Path, out: Path, form: str, group_size: int) -> None:
    """Raise ModelError if `out` is not empty, or groups do not divide the inputs of a matrix."""
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out} is a file; choose a new folder")
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty; choose a new folder")
    if form != "int4":
        return
    checkpoint = SafetensorsCheckpoint(folder, tied=True)
    stored = {name: checkpoint.stored(name) for name in sorted(matrices_of(folder))}
    checkpoint.close()
    for name, found in stored.items():
        if found and (group_size < _MIN_GROUP or found.shape[1] % group_size):
            raise ModelError(
                f"{name} has {found.shape[1]} inputs, which groups of {group_size} do not divide; choose another "
                f"group size of at least {_MIN_GROUP}"
            )


def _copy_others(folder: Path, out: Path) -> None:
    """Copy the files that hold no weights: tokenizer, templates, licence."""
    for file in folder.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and file.name not in (_INDEX, "config.json"):
            shutil.copyfile(file, out / file.name)
