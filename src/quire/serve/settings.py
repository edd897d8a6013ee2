"""Settings of the server, beside those of the engine. Each field is also a flag and a key of the YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.types import MAX_LOGPROBS, ConfigError


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _list(help: str) -> Any:
    return field(default_factory=list, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = _setting(8000, "port to listen on; 0 takes a free one and prints it")
    served_model_name: list[str] = _list("names of the model in requests; the first is that in answers")
    strict: bool = _setting(False, "refuse fields that are not known, instead of answering with a warning")

    api_key: list[str] = _list("keys that clients must send one of (also QUIRE_API_KEY)")
    api_key_file: str | None = _setting(
        None, "file with one key per line, optionally followed by name=team, weight=2 and admin"
    )
    share_prefix_cache: bool = _setting(
        False,
        "let API keys share cached prefixes: faster for prompts that many users share, but cached_tokens and the time to "
        "first token then tell one user what another one sent",
    )
    max_body_bytes: int | None = _setting(
        None,
        "longest request body in bytes (default: 4 MiB and 64 for each token of the context, at most 16 MiB)",
    )
    max_body_elements: int = _setting(
        65536, "most strings, lists and objects in a request body; numbers in lists have a limit of their own"
    )
    allowed_hosts: list[str] = _list(
        "names in the Host header that are accepted, such as llm.example.com or *.example.com (default: this "
        "machine's local names when listening on a loopback address without a key, else any)"
    )
    allowed_origins: list[str] = _list("origins that browsers may call from (default: none)")
    allowed_methods: list[str] = _list("HTTP methods for those origins (default: all)")
    allowed_headers: list[str] = _list("request headers for those origins (default: all)")
    allow_credentials: bool = _setting(False, "let those origins send cookies and credentials")
    ssl_keyfile: str | None = _setting(None, "TLS key file")
    ssl_certfile: str | None = _setting(None, "TLS certificate file")

    max_waiting: int = _setting(2048, "requests that may wait for the engine; further ones get 503")
    max_waiting_tokens: int | None = _setting(None, "prompt tokens that may wait; further requests get 503")
    request_timeout: float | None = _setting(None, "seconds after which a request is given up (504)")
    slow_reader_timeout: float = _setting(
        120.0, "seconds without progress after which a client that does not read is dropped"
    )
    shutdown_timeout: float = _setting(
        30.0, "seconds that open requests may go on after SIGTERM; a second signal stops at once"
    )

    pooling: str = _setting(
        "auto",
        "embeddings: mean, or last (token); auto: as the model's 1_Pooling/config.json says, else mean",
    )
    max_stored_responses: int = _setting(
        1024, "responses of /v1/responses that are kept in memory for each API key; 0 keeps none"
    )
    max_stored_bytes: int = _setting(
        256 << 20, "bytes that kept responses may take together; each API key has its share by weight"
    )
    receipts: bool = _setting(False, "send a latency receipt with every answer, asked for or not")
    max_logprobs: int = _setting(
        20, f"most alternatives per token that a request may ask for; -1: {MAX_LOGPROBS}"
    )
    response_role: str = _setting("assistant", "role of answers in chats")
    chat_template: str | None = _setting(None, "a Jinja chat template, or a file that holds one")
    trust_request_chat_template: bool = _setting(
        False, "accept chat_template in requests; each is rendered in a helper process with limits"
    )
    tool_call_parser: str = _setting(
        "auto",
        "how the model writes calls of tools: hermes, llama3_json, mistral, json; none; auto: by its template",
    )
    reasoning_parser: str = _setting(
        "auto", "how the model marks its thoughts: think (for <think>); none; auto: by its template"
    )
    stream_tool_arguments: bool = _setting(
        False, "send calls while they are written, also if only the end can tell whether they are well-formed"
    )
    page: bool = _setting(True, "serve the page with playground and live view at /")
    tokenizer_threads: int = _setting(2, "threads for tokenizer and chat templates")
    dry_run: bool = _setting(False, "load no model: every request is answered with its own prompt")
    dry_run_step_ms: float = _setting(0.0, "milliseconds that a step takes with --dry-run")
    log_level: str = _setting("warning", "log level of the server: debug, info, warning, error")
    log_format: str = _setting("text", "form of the server's lines: text, json")
    log_requests: bool = _setting(False, "write a line for every request that is over")
    log_stats_interval: float = _setting(10.0, "seconds between lines with the server's figures; 0: none")
    otlp_endpoint: str | None = _setting(
        None, "send OpenTelemetry traces to this collector (OTLP over HTTP, such as http://localhost:4318)"
    )

    def __post_init__(self) -> None:
        at_least = {
            "port": 0,
            "max_waiting": 1,
            "max_body_elements": 1,
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
            raise ConfigError("served_model_name is empty: leave it out to use the model's own")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format must be text or json, got {self.log_format!r}")
        for name in (
            "request_timeout", "slow_reader_timeout", "shutdown_timeout", "dry_run_step_ms", "log_stats_interval",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a number of at least 0, got {value}")
        if self.request_timeout == 0:
            raise ConfigError(
                "request_timeout must be above 0, or be left out: every request would be given up"
            )
        if self.pooling not in ("auto", "mean", "last"):
            raise ConfigError(f"pooling must be auto, mean or last, got {self.pooling!r}")
        for name in ("max_waiting_tokens", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile")
        self._check_parsers()
        if self.log_level.lower() not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level must be debug, info, warning or error, got {self.log_level!r}")

    def _check_parsers(self) -> None:
        if self.tool_call_parser not in ("auto", "none"):
            from quire.serve.answer.tools.registry import TOOL_PARSERS, known_tool_parser

            if not known_tool_parser(self.tool_call_parser):
                names = ", ".join(["auto", *TOOL_PARSERS])
                raise ConfigError(f"tool_call_parser must be {names} or none, got {self.tool_call_parser!r}")
        if self.reasoning_parser not in ("auto", "none"):
            from quire.serve.answer.reasoning import known_reasoning_parser

            if not known_reasoning_parser(self.reasoning_parser):
                raise ConfigError(
                    f"reasoning_parser must be auto, think or none, got {self.reasoning_parser!r}"
                )
