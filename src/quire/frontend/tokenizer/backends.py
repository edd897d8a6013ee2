"""The tokenizer libraries `tokenizers` and `sentencepiece` behind one protocol.

A backend maps pieces to ids and to bytes. tokenizer.py adds begin-of-sequence tokens, defaults and chat templates. The
unit is bytes, not text, because one token may hold part of a character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as JsonTokenizer

from quire.types import ModelError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHORT_CHARS = 2048  # a text of this length is tokenized within a few milliseconds
_WINDOW_CHARS = 65_536  # searched for special tokens in one call, which holds the GIL
SPACE = "▁"  # SentencePiece's symbol for a space


class Backend(Protocol):
    """The operations that a tokenizer library must provide."""

    strips_space: bool  # the encoder adds a space before a text, which decoding must remove

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> set[int]:
        """Return the ids of tokens that are markup, not text."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, framed by the vocabulary's own rules if `add_special_tokens`."""
        ...

    def id_of(self, piece: str) -> int | None:
        """Return the id of a piece as the vocabulary spells it, or None."""
        ...

    def piece_of(self, token: int) -> str | None:
        """Return the piece of an id as the vocabulary spells it, or None."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds inside a text; empty for an unknown id."""
        ...

    def decode_whole(self, ids: list[int]) -> str | None:
        """Return the text of `ids`, or None if it is the concatenation of their bytes.

        Only decoders that treat the first token specially return a text.
        """
        ...

    def mark_special(self, pieces: list[str]) -> None:
        """Match these pieces of the vocabulary as whole tokens in any text."""
        ...

    def extend(self, tokens: dict[int, tuple[str, bool]]) -> None:
        """Add tokens that a config lists outside the vocabulary: id to (piece, is special)."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE: printable bytes are themselves, others start at U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


class JsonBackend:
    """A backend for `tokenizer.json` files and other tokenizers of the `tokenizers` library."""

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        steps = _decoder_steps(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None)
        kinds = [step["type"] for step in steps]
        self._byte_level = "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}
        self._byte_fallback = "ByteFallback" in kinds and set(kinds) <= {
            "Replace",
            "ByteFallback",
            "Fuse",
            "Strip",
        }
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        self.strips_space = self._byte_fallback and any(
            step["type"] == "Strip" and step["content"] == " " and step["start"] for step in steps
        )
        self._anchor = next((i for i in range(tokenizer.get_vocab_size()) if self._is_anchor(i)), None)

    def _is_anchor(self, token: int) -> bool:
        return self._tokenizer.decode([token], skip_special_tokens=False).strip().isalpha()

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> set[int]:
        return {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # Unlike `encode`, this releases the GIL and computes no offsets, which are not needed.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def id_of(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def piece_of(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    def bytes_of(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # the model's vocabulary is padded with ids that the tokenizer does not have
            return b""
        if self._byte_level:
            values = [BYTE_OF_CHAR.get(c) for c in piece]
            return piece.encode() if None in values else bytes(b for b in values if b is not None)
        if self._byte_fallback:
            byte = _BYTE_PIECE.fullmatch(piece)
            if byte:
                return bytes.fromhex(byte[1])
            for pattern, content in self._replaced:
                piece = piece.replace(pattern, content)
            return piece.encode()
        return self._after_anchor(token)

    def _after_anchor(self, token: int) -> bytes:
        """Return the bytes that a token adds after another token, found by decoding both."""
        if self._anchor is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        before = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        both = self._tokenizer.decode([self._anchor, token], skip_special_tokens=False)
        return both.removeprefix(before).encode()

    def decode_whole(self, ids: list[int]) -> str | None:
        if self._byte_level or self._byte_fallback:
            return None
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def mark_special(self, pieces: list[str]) -> None:
        added = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}
        new = []
        for piece in pieces:
            token = added.get(piece) or AddedToken(piece, normalized=False)
            if not token.special:
                token.special = True
                new.append(token)
        self._tokenizer.add_special_tokens(new)

    def extend(self, tokens: dict[int, tuple[str, bool]]) -> None:
        for token, (piece, special) in sorted(tokens.items()):
            if self._tokenizer.token_to_id(piece) is None and token == self.vocab_size:
                self._tokenizer.add_tokens([AddedToken(piece, normalized=False, special=special)])


# Appended to a serialized SentencePiece model, this sets normalizer_spec.add_dummy_prefix to false. Later fields of a
# protocol buffer win: field 3 (normalizer_spec), length 2, its field 3 (add_dummy_prefix), value 0.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceBackend:
    """A backend for SentencePiece models. It splits a text at special tokens, which the model itself never matches.

    Args:
        model: the serialized model, a protocol buffer.
        legacy_prefix: add a leading space to every stretch between special tokens, not only to the first.

    Raises:
        ModelError: if the model cannot be parsed.
    """

    def __init__(self, model: bytes, legacy_prefix: bool) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor()
            self._model.LoadFromSerializedProto(model)
            self._bare = sentencepiece.SentencePieceProcessor()
            self._bare.LoadFromSerializedProto(model + _NO_DUMMY_PREFIX)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ModelError(f"the SentencePiece model cannot be read: {error}") from error
        self._legacy_prefix = legacy_prefix
        self._added: dict[int, str] = {}
        size = self._model.get_piece_size()
        # The unknown token is markup, too, and is matched in text as other special tokens are.
        self._special = {i for i in range(size) if self._model.is_control(i) or self._model.is_unknown(i)}
        self.strips_space = self._model.normalize("a").startswith((SPACE, " "))
        self._matched = {self._model.id_to_piece(i): i for i in self._special}
        self._compile()

    def _compile(self) -> None:
        pieces = sorted(filter(None, self._matched), key=len, reverse=True)  # the longest match wins
        self._cut = re.compile("|".join(map(re.escape, pieces)) or r"(?!)")  # (?!) matches nothing
        self._longest_matched = len(pieces[0]) if pieces else 0

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size() + len(self._added)

    @property
    def special_ids(self) -> set[int]:
        return self._special

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        text.encode()  # raises for a lone surrogate, which the model would turn into a wrong token
        begin = 0
        for match in self._matches(text):
            ids += self._encode_stretch(text[begin : match.start()], begin == 0)
            ids.append(self._matched[match[0]])
            begin = match.end()
        return ids + self._encode_stretch(text[begin:], begin == 0)

    def _encode_stretch(self, text: str, first: bool) -> list[int]:
        model = self._model if first or self._legacy_prefix else self._bare
        found: list[int] = model.encode(text) if text else []
        return found

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the special tokens in `text`, searching one window at a time."""
        start = 0
        while start < len(text):
            end = start + _WINDOW_CHARS
            match = self._cut.search(text, start, end + self._longest_matched)
            if match is None or match.start() >= end:  # a longer token may begin after the window
                start = end
            else:
                yield match
                start = match.end()

    def id_of(self, piece: str) -> int | None:
        if piece in self._matched:
            return self._matched[piece]
        token = self._model.piece_to_id(piece)
        return None if token == self._model.unk_id() else token

    def piece_of(self, token: int) -> str | None:
        if token in self._added:
            return self._added[token]
        return self._model.id_to_piece(token) if 0 <= token < self._model.get_piece_size() else None

    def bytes_of(self, token: int) -> bytes:
        piece = self.piece_of(token)
        if piece is None:
            return b""
        if token not in self._added and self._model.is_byte(token):
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(SPACE, " ").encode()

    def decode_whole(self, ids: list[int]) -> str | None:
        return None

    def mark_special(self, pieces: list[str]) -> None:
        for piece in pieces:
            token = self.id_of(piece)
            if token is not None:
                self._matched[piece] = token
                self._special.add(token)
        self._compile()

    def extend(self, tokens: dict[int, tuple[str, bool]]) -> None:
        for token, (piece, special) in sorted(tokens.items()):
            if token == self.vocab_size:
                self._added[token] = piece
            elif self.piece_of(token) != piece:
                continue
            self._matched[piece] = token
            if special:
                self._special.add(token)
        self._compile()
