"""Build a tokenizer backend from the vocabulary inside a GGUF file.

Two kinds are supported. `gpt2` is byte-level BPE: the file has tokens and merges, and names the regular expression that
splits a text first. `llama` is SentencePiece BPE: the file has tokens and scores, from which a SentencePiece model is
written.
"""

from __future__ import annotations

import struct
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as JsonTokenizer

from quire.files.reading import shown
from quire.frontend.tokenizer.backends import Backend, JsonBackend, SentencePieceBackend
from quire.frontend.tokenizer.limits import MAX_ADDED, check_count
from quire.types import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types of SentencePiece
_TYPES = set(range(1, 7))

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words_and_digits(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased_words(contractions: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    end = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    return f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}|{digits}|{end}"


_LLAMA3 = (_words_and_digits(r"\p{N}{1,3}"),)
_QWEN2 = (_words_and_digits(r"\p{N}"),)
_O200K = (_cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)
_TEKKEN = (_cased_words("", r"\p{N}"),)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _TAIL,
)

# Splits by the names that files use. Each pattern is applied to the pieces that the one before left.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _SINGLE_DIGITS),
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK_V3,
}
_IGNORE_MERGES = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "tekken",
)  # a word that is in the vocabulary is one token
_NFC = ("qwen2", "deepseek-r1-qwen")
ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # if the file does not say


def gguf_backend(meta: dict[str, Any], name: str) -> Backend:
    """Build the backend that a GGUF header describes.

    Args:
        meta: the metadata of the header.
        name: name of the file, for errors.

    Raises:
        ModelError: if the file has no tokenizer, a corrupt one, or one of an unknown kind.
    """
    kind = meta.get("tokenizer.ggml.model")
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelError(f"{name} holds no tokenizer; give one with the tokenizer setting")
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    _check_column(name, "token types", types, len(tokens), int)
    if not set(types) <= _TYPES:
        raise ModelError(f"{name} is corrupt: token types must be 1 to 6, got {shown(set(types) - _TYPES)}")
    if kind == "gpt2":
        return _byte_level_backend(meta, name, tokens, types)
    if kind == "llama":
        return _score_backend(meta, name, tokens, types)
    raise ModelError(
        f"{name} has a tokenizer of kind {shown(kind)}; Quire reads gpt2 and llama, or give another tokenizer"
    )


def _check_column(name: str, what: str, values: object, count: int | None, kind: type) -> None:
    """Raise ModelError unless `values` is a list of `kind`, of length `count` if that is given."""
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelError(f"{name} is corrupt: its {what} must be a list of {kind.__name__}")
    if count is not None and len(values) != count:
        raise ModelError(f"{name} is corrupt: {count} tokens but {len(values)} {what}")


def _byte_level_backend(meta: dict[str, Any], name: str, tokens: list[str], types: list[int]) -> Backend:
    split = meta.get("tokenizer.ggml.pre", "default")
    if not isinstance(split, str) or split not in SPLITS:
        known = ", ".join(SPLITS)
        raise ModelError(
            f"{name} splits text as {shown(split)}, which Quire does not know (it knows {known})"
        )
    listed = meta.get("tokenizer.ggml.merges") or []
    _check_column(name, "merges", listed, None, str)
    merges = [tuple(m.split(" ")) for m in listed]
    backend = byte_level_bpe({t: i for i, t in enumerate(tokens)}, merges, split, name)
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    check_count(name, "added tokens", len(added), MAX_ADDED)
    backend.add_tokens(added)
    return JsonBackend(backend)


def byte_level_bpe(vocab: dict[str, int], merges: list[Any], split: str, name: str) -> JsonTokenizer:
    """Build a byte-level BPE tokenizer.

    Args:
        vocab: token ids by piece.
        merges: pairs of pieces, best first.
        split: name of the split (`SPLITS`).
        name: name of the file or folder, for errors.

    Raises:
        ModelError: if a merge is not in the vocabulary.
    """
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=split in _IGNORE_MERGES)
    except Exception as error:  # the library raises plain Exception for a merge outside the vocabulary
        raise ModelError(f"the tokenizer of {name} is corrupt: {error}") from error
    tokenizer = JsonTokenizer(bpe)
    if split in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITS[split]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _score_backend(meta: dict[str, Any], name: str, tokens: list[str], types: list[int]) -> Backend:
    scores = meta.get("tokenizer.ggml.scores") or []
    _check_column(name, "scores", scores, len(tokens), float)
    unknown = _unknown_id(meta, types)
    # SentencePiece accepts only one unknown token, so the others become control tokens.
    kinds = [_CONTROL if kind == _UNKNOWN and i != unknown else kind for i, kind in enumerate(types)]
    pieces = b"".join(
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(tokens, scores, kinds)
    )
    byte_fallback = all(f"<0x{b:02X}>" in tokens for b in (0, 255))
    trainer = _number(3, 2) + _number(35, byte_fallback) + _number(40, unknown)  # model type 2 is BPE
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    squeeze = bool(meta.get("tokenizer.ggml.remove_extra_whitespaces", False))
    normalizer = _field(1, b"identity") + _number(3, prefix) + _number(4, squeeze) + _number(5, True)
    model = pieces + _field(2, trainer) + _field(3, normalizer)
    try:
        return SentencePieceBackend(model, legacy_prefix=True)
    except ModelError as error:
        raise ModelError(f"the tokenizer of {name} is corrupt: {error}") from error


def _unknown_id(meta: dict[str, Any], types: list[int]) -> int:
    """Return the id of the unknown token: the one that the file names, else the first of that type, else 0."""
    named = meta.get("tokenizer.ggml.unknown_token_id")
    if isinstance(named, int) and 0 <= named < len(types) and types[named] == _UNKNOWN:
        return named
    return types.index(_UNKNOWN) if _UNKNOWN in types else 0


def _number(field: int, value: int) -> bytes:
    """Encode an integer field of a protocol buffer."""
    return _varint(field << 3) + _varint(int(value))


def _field(field: int, payload: bytes) -> bytes:
    """Encode a length-delimited field of a protocol buffer: bytes, a string or a message."""
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
