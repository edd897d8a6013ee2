"""`Tokenizer` converts text to token ids and back, for every vocabulary format.

`load_tokenizer` builds one from `tokenizer.json`, `tokenizer.model`, `vocab.json` with `merges.txt`, or a GGUF file.
Decoding concatenates the bytes of the tokens and reads them as UTF-8. One table of bytes serves whole texts, streams
(detokenizer.py) and log-probabilities, so they agree. `NoTokenizer` takes its place in an engine without text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as JsonTokenizer

from quire.files.gguf_header import read_gguf_metadata
from quire.files.reading import MAX_VOCABULARY_BYTES, check_regular, read_json, read_text
from quire.frontend.generation_config import load_eos_ids
from quire.frontend.tokenizer.backends import Backend, JsonBackend, SentencePieceBackend
from quire.frontend.tokenizer.gguf_tokenizer import ADDS_BOS, byte_level_bpe, gguf_backend
from quire.frontend.tokenizer.limits import MAX_ADDED, MAX_TOKENS, check_count, read_tokenizer_json
from quire.types import ModelError, RequestError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_MAX_PIECES_BYTES = 32 << 20  # size of a SentencePiece model: six times the largest published one
# End-of-turn tokens, which many GGUF files contain without naming them as end-of-sequence tokens.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|return|>",
)


@dataclass(slots=True)
class TokenizerSettings:
    """The settings of a tokenizer in its config files, in one form for every format."""

    special_tokens: dict[str, str] = field(default_factory=dict)  # pieces by name: bos_token, eos_token, ...
    add_bos: bool | None = None  # None: follow the vocabulary's own rules
    add_eos: bool | None = None
    eos_ids: list[int] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """An encoder and decoder of one vocabulary. It is immutable, except for its cache of token bytes.

    Attributes:
        special_tokens: pieces by name, such as bos_token.
        special_ids: ids of the tokens that are markup, not text.
        vocab_size: number of ids, which may be less than the model's.
        bos_id: id of the begin-of-sequence token, or None.
        eos_ids: ids of the end-of-sequence tokens.
        chat_templates: Jinja sources by name; "default" is the main one.
    """

    def __init__(self, backend: Backend, settings: TokenizerSettings) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self.special_tokens = settings.special_tokens
        self.chat_templates = settings.chat_templates
        known = [p for p in dict.fromkeys(settings.special_tokens.values()) if backend.id_of(p) is not None]
        backend.mark_special(known)
        self.special_ids: frozenset[int] = frozenset(backend.special_ids)
        self.vocab_size = backend.vocab_size
        self.bos_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self.eos_ids: list[int] = list(dict.fromkeys(([] if eos is None else [eos]) + settings.eos_ids))
        # Encode a text to see which tokens the vocabulary's own rules add.
        probe = backend.encode("a", True)
        self._drop_bos = settings.add_bos is False and probe[:1] == [self.bos_id]
        self._put_bos = bool(settings.add_bos) and self.bos_id is not None and probe[:1] != [self.bos_id]
        self._put_eos = eos if settings.add_eos and probe[-1:] != [eos] else None

    def _special_id(self, name: str) -> int | None:
        piece = self.special_tokens.get(name)
        return None if piece is None else self._backend.id_of(piece)

    @cached_property
    def longest_token_chars(self) -> int:
        """Return the length of the longest token in characters. Computing it takes 50 ms for a large vocabulary."""
        pieces = map(self._backend.piece_of, range(self.vocab_size))
        return max((len(piece) for piece in pieces if piece is not None), default=1)

    @property
    def chat_template(self) -> str | None:
        """Return the main chat template, or None."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: add begin- and end-of-sequence tokens as the model's config says. False for rendered
                chat templates, which contain them.

        Raises:
            RequestError: if the text is not valid Unicode.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "text must be valid Unicode: it holds half of a surrogate pair", param="prompt"
            ) from error
        if add_special_tokens:
            if self._drop_bos:
                ids = ids[1:]
            elif self._put_bos and self.bos_id is not None:
                ids.insert(0, self.bos_id)
            if self._put_eos is not None:
                ids.append(self._put_eos)
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Invalid UTF-8 becomes U+FFFD."""
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        whole = self._backend.decode_whole(ids)
        if whole is not None:
            return whole
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text[1:] if self._backend.strips_space and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds inside a text; empty for an id outside the vocabulary."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._backend.bytes_of(token)
        return data

    def opening_bytes(self, token: int) -> bytes:
        """Return the bytes of a token at the beginning of a text, without the space that some encoders add there."""
        whole = self._backend.decode_whole([token])
        if whole is not None:
            return whole.encode()
        data = self.token_bytes(token)
        return data.removeprefix(b" ") if self._backend.strips_space else data

    def token_text(self, token: int) -> str:
        """Return the text of one token, to be read by people. Special tokens are shown by name."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary spells it, such as `Ġthe`; empty for an id outside the vocabulary."""
        return self._backend.piece_of(token) or ""

    def token_id(self, piece: str) -> int | None:
        """Return the id of a piece as the vocabulary spells it, such as `<|im_end|>`, or None."""
        return self._backend.id_of(piece)

    def is_special(self, token: int) -> bool:
        return token in self.special_ids


class NoTokenizer(Tokenizer):
    """The tokenizer of an engine with `skip_tokenizer_init`. It accepts no text and produces none."""

    def __init__(self, eos_ids: list[int] | None = None) -> None:
        self.special_tokens, self.chat_templates = {}, {}
        self.special_ids = frozenset()
        self.vocab_size = 0
        self.longest_token_chars = (
            1 << 30
        )  # lets every text pass the length check, so that `encode` refuses it
        self.bos_id = None
        self.eos_ids = eos_ids or []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise RequestError(
            "this engine runs without a tokenizer (skip_tokenizer_init): give prompt_token_ids, not text",
            param="prompt",
        )

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        raise RequestError(
            "this engine runs without a tokenizer (skip_tokenizer_init): it returns token ids, no text"
        )

    def token_bytes(self, token: int) -> bytes:
        return b""

    def opening_bytes(self, token: int) -> bytes:
        return b""

    def piece(self, token: int) -> str:
        return ""

    def token_id(self, piece: str) -> int | None:
        return None


# ---------------------------------------------------------------------------------------- loading


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model folder, a .gguf file, or a single tokenizer.json or tokenizer.model.

    Raises:
        ModelError: if there is no tokenizer, or it is malformed or too large.
    """
    if path.suffix == ".gguf":
        return _load_gguf(path)
    folder = path if path.is_dir() else path.parent
    config = _json(folder / "tokenizer_config.json")
    backend = _backend_of_file(path, config) if path.is_file() else _backend_of_folder(path, config)
    backend.extend(_added_tokens(folder, config))
    settings = TokenizerSettings(
        special_tokens=_special_tokens(folder, config),
        add_bos=_flag(config, "add_bos_token"),
        add_eos=_flag(config, "add_eos_token"),
        eos_ids=load_eos_ids(folder),
        chat_templates=_folder_templates(folder, config),
    )
    if isinstance(backend, SentencePieceBackend) and settings.add_bos is None:
        settings.add_bos = "bos_token" in settings.special_tokens
    return Tokenizer(backend, settings)


def _backend_of_folder(folder: Path, config: dict[str, Any]) -> Backend:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).exists():
            return _backend_of_file(folder / name, config)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        lines = read_text(folder / "merges.txt", MAX_VOCABULARY_BYTES).split("\n")
        check_count(folder / "merges.txt", "merges", len(lines), 4 * MAX_TOKENS)
        if lines[0].startswith("#version"):  # a later line that begins with # is a merge
            lines = lines[1:]
        merges = [tuple(line.split(" ")) for line in lines if line]
        split = "qwen2" if str(config.get("tokenizer_class")).startswith("Qwen") else "gpt-2"
        return JsonBackend(byte_level_bpe(_vocabulary(folder), merges, split, str(folder)))
    raise ModelError(
        f"{folder} has no tokenizer.json, tokenizer.model or vocab.json with merges.txt; "
        "name another tokenizer with the tokenizer setting, or set skip_tokenizer_init"
    )


def _backend_of_file(path: Path, config: dict[str, Any]) -> Backend:
    if path.suffix == ".model":
        check_regular(path, _MAX_PIECES_BYTES)
        try:
            return SentencePieceBackend(path.read_bytes(), legacy_prefix=config.get("legacy") is not False)
        except (ModelError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    text = read_tokenizer_json(path)
    try:
        return JsonBackend(JsonTokenizer.from_str(text))
    except Exception as error:  # the library raises plain Exception for everything it cannot read
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error


def _flag(config: dict[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None


def _content(token: Any) -> str | None:
    """Return the piece of a token in a config file, which is a string or an object that holds one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    merged = {**_json(folder / "special_tokens_map.json"), **config}
    found = {name: _content(merged.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in found.items() if text}


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    found: dict[int, tuple[str, bool]] = {}
    for piece, token in _json(folder / "added_tokens.json").items():
        if isinstance(token, int):
            found[token] = (piece, piece.startswith("<"))
    listed = config.get("added_tokens_decoder")
    for token, entry in (listed if isinstance(listed, dict) else {}).items():
        content = _content(entry)
        if content and token.isascii() and token.isdigit() and len(token) < 10:
            found[int(token)] = (content, bool(isinstance(entry, dict) and entry.get("special")))
    check_count(folder, "added tokens", len(found), MAX_ADDED)
    return found


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, optional=True)


def _vocabulary(folder: Path) -> dict[str, int]:
    found = read_json(folder / "vocab.json", MAX_VOCABULARY_BYTES)
    check_count(folder / "vocab.json", "tokens", len(found), MAX_TOKENS)
    return found


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name. Template files take precedence over the templates in configs."""
    templates: dict[str, str] = {}
    for given in (config.get("chat_template"), _json(folder / "chat_template.json").get("chat_template")):
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            templates |= {
                e["name"]: e["template"]
                for e in given
                if isinstance(e, dict)
                and isinstance(e.get("name"), str)
                and isinstance(e.get("template"), str)
            }
    files = {"default": folder / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: read_text(file) for name, file in files.items() if file.exists()}


def _load_gguf(path: Path) -> Tokenizer:
    meta = read_gguf_metadata(path)
    backend = gguf_backend(meta, str(path))
    special: dict[str, str] = {}
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in keys.items():
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        piece = backend.piece_of(token) if isinstance(token, int) else None
        if piece is not None:
            special[name] = piece
    ends = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    ends += [token for token in map(backend.id_of, _END_OF_TURN) if token in backend.special_ids]
    add_bos = meta.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = meta["tokenizer.ggml.model"] == "llama" or meta.get("tokenizer.ggml.pre") in ADDS_BOS
    template = meta.get("tokenizer.chat_template")
    settings = TokenizerSettings(
        special_tokens=special,
        add_bos=bool(add_bos),
        add_eos=_flag(meta, "tokenizer.ggml.add_eos_token"),
        eos_ids=[token for token in ends if isinstance(token, int)],
        chat_templates={"default": template} if isinstance(template, str) else {},
    )
    return Tokenizer(backend, settings)
