"""`quire quantize`: write a quantised copy of a checkpoint, which transformers and vLLM load too."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from quire.cli.bench_flags import at_least_one
from quire.cli.flags import MODEL_HELP
from quire.cli.output_paths import output_folder
from quire.types import ConfigError

_FORMATS = ("fp8", "fp8-block", "int8", "int4")
_GROUP_SIZE = 128
_CALIBRATION_TOKENS = 32768
_SEQUENCE = 512  # tokens of a sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire quantize`."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "out", metavar="OUT", type=output_folder, help="folder to write, which must be empty or missing"
    )
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        required=True,
        help="fp8 (scales per row), fp8-block (scales per 128x128 block), int8 (W8A8) or int4 (weights only)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=_GROUP_SIZE,
        help=f"columns with a common scale, for int4 (default: {_GROUP_SIZE}); fewer are more precise and larger",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        help="text, or JSON lines with a field `text`: int4 is rounded for the inputs of the layers on it (GPTQ)",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=_CALIBRATION_TOKENS,
        help=f"tokens of the file to use (default: {_CALIBRATION_TOKENS})",
    )
    parser.add_argument("--device", default="auto", help="where to compute: auto, cpu, cuda or cuda:N")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, with a progress bar on a terminal, and return the exit code."""
    at_least_one(args, "group_size", "calibration_tokens")
    from tqdm import tqdm

    from quire.assembly.device import pick_device
    from quire.frontend.location import locate_model
    from quire.models.checkpoint.calibrate import calibrated_int4
    from quire.models.checkpoint.quantize import check_new, matrices_of, quantise_checkpoint

    folder = locate_model(args.model, None).path
    if folder.suffix == ".gguf":
        raise ConfigError(f"{folder} is a GGUF file; `quire quantize` reads folders of safetensors files")
    if args.calibrate and args.format != "int4":
        raise ConfigError(f"--calibrate works with --format int4, not {args.format}")
    out, matrices, device = args.out, matrices_of(folder), pick_device(args.device)
    count = len(matrices)
    with tqdm(total=count, unit="matrix", disable=not sys.stderr.isatty()) as bar:

        def progress(name: str) -> None:
            bar.update()

        calibrated = None
        if args.calibrate:
            rows = calibration_rows(folder, args.calibrate, args.calibration_tokens)
            check_new(folder, out, args.format, args.group_size)
            calibrated = calibrated_int4(folder, set(matrices), rows, args.group_size, device, progress)
        quantise_checkpoint(folder, out, args.format, args.group_size, device, progress, calibrated)
    before, after = (sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (folder, out))
    print(
        f"{out}: {count} matrices in {args.format}, {after / 1e6:,.1f} MB instead of {before / 1e6:,.1f} MB"
    )
    return 0


def calibration_rows(folder: Path, file: Path, most_tokens: int) -> list[list[int]]:
    """Return the token ids of a text in sequences of at most 512, at most `most_tokens` in all.

    Args:
        folder: the model, with its tokenizer.
        file: plain text, or JSON lines (.jsonl), each an object with a string `text`.
        most_tokens: limit of all sequences together.

    Raises:
        ConfigError: if the file cannot be read, or a line is not such an object.
    """
    from quire.frontend.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    rows: list[list[int]] = []
    left = most_tokens
    for text in _texts(file):
        tokens = tokenizer.encode(text)
        for start in range(0, len(tokens), _SEQUENCE):
            if left <= 0:
                return rows
            rows.append(tokens[start : start + min(_SEQUENCE, left)])
            left -= len(rows[-1])
    return rows


def _texts(file: Path) -> list[str]:
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibrate {file} cannot be read as text ({error})") from error
    if file.suffix != ".jsonl":
        return [content]
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f"--calibrate {file}: line {number} is not a JSON object with a string `text`")
        found.append(text)
    return found
