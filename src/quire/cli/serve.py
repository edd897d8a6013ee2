"""`quire serve`: the HTTP server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from quire.cli.config_file import read_config
from quire.cli.flags import add_flags, add_model, check_one_model, given
from quire.cli.loading import loading_elsewhere
from quire.config import EngineConfig
from quire.serve.engine_process_client import EngineProcess
from quire.serve.http.auth import load_keys
from quire.serve.http.listen import bind, check_tls
from quire.serve.http.stop import ShutdownSignal
from quire.serve.replicas.replica_set import ReplicaSet
from quire.serve.settings import ServeConfig, served_config
from quire.types import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire serve`."""
    add_model(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; flags of the command line override it"
    )
    add_flags(parser, "server", ServeConfig, several=True)
    add_flags(parser, "engine", EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or Ctrl-C and return the exit code."""
    if sys.platform == "win32":
        raise ConfigError(
            "quire serve needs Linux or macOS for its engine process; on Windows run it in WSL or a container, or use "
            "quire generate, quire chat or LLM in Python"
        )
    classes = (ServeConfig, EngineConfig)
    settings, config = read_config(args.config, classes) if args.config is not None else ({}, {})
    settings |= given(args, ServeConfig)
    config |= given(args, EngineConfig)
    if args.model_name is not None:
        check_one_model(args.model_name, given(args, EngineConfig))
        config["model"] = args.model_name
    elif "model" not in config and (flag := getattr(args, "several", None)):
        raise ConfigError(
            f"the last value of {flag} may be meant as the model: name the model first, `quire serve MODEL {flag} ...`"
        )
    return _start(served_config(EngineConfig(**config)), ServeConfig(**settings))


def _start(config: EngineConfig, settings: ServeConfig) -> int:
    if settings.shed and not config.learns_step_times:
        raise ConfigError(
            "shed compares predicted times with targets: set target_ttft, or target_itl or prefill_slowdown if only "
            "requests and API keys have targets"
        )
    keys = load_keys(settings.api_key, os.environ.get("QUIRE_API_KEY", ""), settings.api_key_file)
    check_tls(settings)
    sock = bind(settings)
    stop = ShutdownSignal()
    # The engine processes import torch while this process imports the HTTP server.
    step_s = settings.dry_run_step_ms / 1000 if settings.dry_run else None
    start = _starter(config, settings, step_s)
    replicas = ReplicaSet(config, settings.routing, start, step_s, settings.shed)
    try:
        from quire.serve.http.server import run

        return run(config, settings, keys, replicas, sock, stop, loading_elsewhere(config.model))
    finally:
        replicas.kill()


def _starter(
    config: EngineConfig, settings: ServeConfig, step_s: float | None
) -> Callable[[int, bytes], EngineProcess] | None:
    """Return the function that starts engine processes in a Ray cluster, or None to start them here."""
    if not settings.ray:
        return None
    from quire.ray.engine_process import RayEngineProcess

    return lambda number, secret: RayEngineProcess(config, step_s, secret)
