"""Conditions, titles and files of the results of `quire bench`."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import Any

from quire.cli.bench_flags import machine_line, sampling
from quire.cli.flags import engine_settings
from quire.types import EngineInfo


def conditions_of(args: argparse.Namespace, info: EngineInfo) -> dict[str, Any]:
    """Return the conditions of the measurement, for the result file."""
    return {
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "backend": "quire",
        "label": args.label,
        "model_id": info.model,
        "tokenizer_id": None,
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention,
        "engine": engine_settings(args),
        "sampling": sampling(args),
    }


def plot_title(conditions: dict[str, Any], load: object, device: str) -> str:
    """Return the title of a plot: model, load, machine and version."""
    name = None if conditions["device"] == "cpu" else device
    return f"{conditions['model_id']}, {conditions['dtype']} on {conditions['device']}: {load}\n{machine_line(name)}"


def save_result(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write a result where the flags of `add_result_arguments` say."""
    from quire.bench.report import result_name, save

    if args.output_json:
        save(args.output_json, result)
    if args.save_result:
        save(args.result_dir / (args.result_filename or result_name(result, args.kind)), result)
