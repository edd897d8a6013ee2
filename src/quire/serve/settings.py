"""Settings of the HTTP server. Each field is also a command-line flag and a key of the YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from quire.config import EngineConfig
from quire.types import MAX_LOGPROBS, ConfigError

# Keeps the P99 of inter-token latencies below four times their median on steady loads (docs/LATENCY.md).
PREFILL_SLOWDOWN = 4.0

RoutingPolicy = Literal["prefix", "load", "round-robin"]


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _list(help: str) -> Any:
    return field(default_factory=list, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of the HTTP server. Raises ConfigError for values outside their limits."""

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 accepts connections from the network")
    port: int = _setting(8000, "port to listen on; 0 picks a free port and prints it")
    served_model_name: list[str] = _list("model names accepted in requests; answers carry the first one")
    any_model_name: bool = _setting(
        False, "accept every model name in requests, for clients that send one of their own; answers carry it"
    )
    strict: bool = _setting(
        False,
        "refuse requests with unknown fields, and schemas with unknown keywords, instead of answering with a warning",
    )

    api_key: list[str] = _list("accepted API keys; clients must send one of them (also QUIRE_API_KEY)")
    api_key_file: str | None = _setting(
        None, "file with one API key per line, optionally followed by name=team, weight=2 and admin"
    )
    share_prefix_cache: bool = _setting(
        False,
        "share cached prefixes between API keys: faster when users share prompts, but cached_tokens and the time to "
        "first token then reveal what other users have sent",
    )
    max_body_bytes: int | None = _setting(
        None,
        "maximum size of a request body in bytes (default: 4 MiB plus 64 bytes per token of context, up to 16 MiB)",
    )
    max_body_elements: int = _setting(
        65536,
        "maximum number of strings, lists and objects in a request body; numbers in lists have a separate limit",
    )
    allowed_hosts: list[str] = _list(
        "names accepted in the Host header, such as llm.example.com or *.example.com (default: local names only when "
        "listening on a loopback address without API keys, otherwise any)"
    )
    allowed_origins: list[str] = _list("web origins that may call the server from a browser (default: none)")
    allowed_methods: list[str] = _list("HTTP methods that those origins may use (default: all)")
    allowed_headers: list[str] = _list("request headers that those origins may send (default: all)")
    allow_credentials: bool = _setting(False, "allow those origins to send cookies and credentials")
    ssl_keyfile: str | None = _setting(None, "TLS private key file; needs --ssl-certfile")
    ssl_certfile: str | None = _setting(None, "TLS certificate file; needs --ssl-keyfile")

    routing: RoutingPolicy = _setting(
        "prefix",
        "choice of a replica with data_parallel_size above 1: prefix weighs cached prefixes against load, load counts "
        "requests only, round-robin takes turns",
    )
    ray: bool = _setting(
        False,
        "place the engine processes and ranks on the nodes of a Ray cluster, that of RAY_ADDRESS or of this host "
        "(extra ray)",
    )
    max_waiting: int = _setting(2048, "maximum number of waiting requests; further requests get 503")
    max_waiting_tokens: int | None = _setting(
        None, "maximum number of prompt tokens in waiting requests; further requests get 503"
    )
    shed: bool = _setting(
        False,
        "refuse requests with 503 if their time to first token is predicted to miss its target: that of the request, of "
        "its API key, or target_ttft",
    )
    request_timeout: float | None = _setting(None, "seconds after which a request is aborted (504)")
    stream_interval: int = _setting(
        1,
        "new tokens of an answer that make an event of its stream, after the first token; more of them are less work for "
        "the server and for clients",
    )
    slow_reader_timeout: float = _setting(
        120.0, "seconds without progress after which a client that does not read its answer is disconnected"
    )
    shutdown_timeout: float = _setting(
        30.0,
        "seconds that open requests may continue after SIGTERM; a second signal stops the server at once",
    )

    allow_pull: bool = _setting(
        False, "let clients of Ollama's API download models into the Hugging Face cache (POST /api/pull)"
    )

    pooling: str = _setting(
        "auto",
        "pooling of embeddings: mean, last (token) or auto (the model's 1_Pooling/config.json, otherwise mean)",
    )
    max_stored_responses: int = _setting(
        1024, "maximum number of responses kept in memory for /v1/responses, per API key; 0 keeps none"
    )
    max_stored_bytes: int = _setting(
        256 << 20, "maximum size of all stored responses in bytes, divided between API keys by weight"
    )
    receipts: bool = _setting(
        False, "send a latency receipt with every answer, even if the request does not ask for it"
    )
    max_logprobs: int = _setting(
        20, f"maximum number of alternatives per token that a request may ask for; -1: {MAX_LOGPROBS}"
    )
    response_role: str = _setting("assistant", "role of the answers in chat completions")
    chat_template: str | None = _setting(None, "Jinja chat template, or a file that contains one")
    trust_request_chat_template: bool = _setting(
        False, "accept chat_template in requests; it is rendered in a helper process with limits"
    )
    tool_call_parser: str = _setting(
        "auto",
        "format of the model's tool calls: hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, gpt_oss, glm45 and "
        "others (docs/TOOLS.md), json, none or auto (from the chat template)",
    )
    close_objects: bool = _setting(
        True,
        "let objects in schemas with properties take no other keys, unless the schema has additionalProperties",
    )
    reasoning_parser: str = _setting(
        "auto",
        "format of the model's reasoning: think (<think> tags), deepseek_r1, gpt_oss, mistral and others "
        "(docs/TOOLS.md), none or auto (from the chat template)",
    )
    stream_tool_arguments: bool = _setting(
        False, "stream tool calls while they are generated, before it is known whether they are well-formed"
    )
    page: bool = _setting(True, "serve a web page with a playground and a live view at /")
    tokenizer_threads: int = _setting(2, "number of threads for tokenization and chat templates")
    dry_run: bool = _setting(False, "load no model: answer every request with its own prompt")
    dry_run_step_ms: float = _setting(0.0, "duration of a step with --dry-run in milliseconds")
    log_level: str = _setting("warning", "log level of the server: debug, info, warning or error")
    log_format: str = _setting("text", "format of log lines: text or json")
    log_requests: bool = _setting(False, "log a line for every finished request")
    log_stats_interval: float = _setting(
        10.0, "seconds between log lines with the server's statistics; 0: never"
    )
    otlp_endpoint: str | None = _setting(
        None, "OTLP/HTTP collector that receives OpenTelemetry traces, such as http://localhost:4318"
    )

    def __post_init__(self) -> None:
        at_least = {
            "port": 0,
            "max_waiting": 1,
            "max_body_elements": 1,
            "stream_interval": 1,
            "tokenizer_threads": 1,
            "max_logprobs": -1,
            "max_stored_responses": 0,
            "max_stored_bytes": 0,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        if not all(name.strip() for name in self.served_model_name):
            raise ConfigError("served_model_name must not be empty; omit it to use the model's name")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format must be text or json, got {self.log_format!r}")
        for name in (
            "request_timeout", "slow_reader_timeout", "shutdown_timeout", "dry_run_step_ms", "log_stats_interval",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a finite number of at least 0, got {value}")
        if self.request_timeout == 0:
            raise ConfigError(
                "request_timeout must be greater than 0, got 0; omit it to let requests run without a limit"
            )
        if self.routing not in get_args(RoutingPolicy):
            raise ConfigError(f"routing must be {', '.join(get_args(RoutingPolicy))}, got {self.routing!r}")
        if self.pooling not in ("auto", "mean", "last"):
            raise ConfigError(f"pooling must be auto, mean or last, got {self.pooling!r}")
        for name in ("max_waiting_tokens", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            given = "ssl_keyfile" if self.ssl_keyfile else "ssl_certfile"
            raise ConfigError(f"TLS needs both ssl_keyfile and ssl_certfile, got only {given}")
        self._check_parsers()
        if self.log_level.lower() not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level must be debug, info, warning or error, got {self.log_level!r}")

    def _check_parsers(self) -> None:
        if self.tool_call_parser not in ("auto", "none"):
            from quire.serve.answer.tools.formats import TOOL_PARSERS, known_tool_parser

            if not known_tool_parser(self.tool_call_parser):
                names = ", ".join(["auto", *TOOL_PARSERS])
                raise ConfigError(f"tool_call_parser must be {names} or none, got {self.tool_call_parser!r}")
        if self.reasoning_parser not in ("auto", "none"):
            from quire.serve.answer.reasoning_formats import REASONING_FORMATS, known_reasoning_parser

            if not known_reasoning_parser(self.reasoning_parser):
                names = ", ".join(["auto", *REASONING_FORMATS])
                raise ConfigError(f"reasoning_parser must be {names} or none, got {self.reasoning_parser!r}")


def served_config(config: EngineConfig) -> EngineConfig:
    """Return engine settings with the defaults of a server, which limits chunks of prompts for even latency.

    Settings that choose the size of chunks, or have none, stay as they are.
    """
    chosen = (config.prefill_slowdown, config.target_itl, config.mixed_prefill_tokens)
    whole = config.chunked_prefill is False or config.kv_layout == "none"
    if whole or any(value is not None for value in chosen):
        return config
    return replace(config, prefill_slowdown=PREFILL_SLOWDOWN)
