"""The two libraries that split text into tokens, behind one protocol: `tokenizers` and `sentencepiece`.

A backend knows pieces and ids, and how a piece turns into bytes; what surrounds that (begin-of-sequence,
defaults, templates) is `tokenizer.py`. Bytes, not text, are the unit: one token may hold half a character.
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
_SHORT_CHARS = 2048  # tokenized within a few milliseconds
_WINDOW_CHARS = 65_536  # searched for special tokens in one call, which holds the interpreter's lock
SPACE = "▁"  # how SentencePiece writes a space


class Backend(Protocol):
    """What a tokenizer library has to offer."""

    strips_space: bool  # the first space of a whole text was put there by the encoder

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> set[int]:
        """Tokens that are markup, not text."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def id_of(self, piece: str) -> int | None: ...

    def piece_of(self, token: int) -> str | None: ...

    def bytes_of(self, token: int) -> bytes: ...

    def decode_whole(self, ids: list[int]) -> str | None:
        """The text of `ids` where a first token reads differently from later ones; None where bytes tell it."""
        ...

    def mark_special(self, pieces: list[str]) -> None:
        """Match these pieces, which the vocabulary has, as whole tokens in any text."""
        ...

    def extend(self, tokens: dict[int, tuple[str, bool]]) -> None:
        """Add tokens (id to piece and whether it is special) that a config lists beside the vocabulary."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself if printable, else 256 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


class JsonBackend:
    """A `tokenizer.json`, or anything else built with the `tokenizers` library."""

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
        # Unlike `encode`, a batch releases the interpreter's lock, and leaves out offsets, which nobody needs.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def id_of(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def piece_of(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    def bytes_of(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # a padded vocabulary: the model has ids that the tokenizer lacks
            return b""
        if self._byte_level:
            found = [BYTE_OF_CHAR.get(c) for c in piece]
            return piece.encode() if None in found else bytes(b for b in found if b is not None)
        if self._byte_fallback:
            byte = _BYTE_PIECE.fullmatch(piece)
            if byte:
                return bytes.fromhex(byte[1])
            for pattern, content in self._replaced:
                piece = piece.replace(pattern, content)
            return piece.encode()
        return self._after_anchor(token)

    def _after_anchor(self, token: int) -> bytes:
        """What a token adds to a text that is under way, whatever the decoder does with it."""
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
        fresh = []
        for piece in pieces:
            token = added.get(piece) or AddedToken(piece, normalized=False)
            if not token.special:
                token.special = True
                fresh.append(token)
        self._tokenizer.add_special_tokens(fresh)

    def extend(self, tokens: dict[int, tuple[str, bool]]) -> None:
        for token, (piece, special) in sorted(tokens.items()):
            if self._tokenizer.token_to_id(piece) is None and token == self.vocab_size:
                self._tokenizer.add_tokens([AddedToken(piece, normalized=False, special=special)])


# Appended to a serialised SentencePiece model (a protocol buffer, where later fields win): field 3,
# normalizer_spec, two bytes: its field 3, add_dummy_prefix, is false.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceBackend:
    """A SentencePiece model. Special tokens are cut out of the text first; the model itself never matches them."""

    def __init__(self, model: bytes, legacy_prefix: bool) -> None:
        """`legacy_prefix`: every stretch between special tokens gets a leading space, not only the first."""
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
        # The unknown token counts: it is markup, and is matched in text, as everywhere else.
        self._special = {i for i in range(size) if self._model.is_control(i) or self._model.is_unknown(i)}
        self.strips_space = self._model.normalize("a").startswith((SPACE, " "))
        self._matched = {self._model.id_to_piece(i): i for i in self._special}
        self._compile()

    def _compile(self) -> None:
        pieces = sorted(filter(None, self._matched), key=len, reverse=True)  # the longest match wins
        self._cut = re.compile("|".join(map(re.escape, pieces)) or r"(?!)")  # without pieces: never
        self._longest_matched = len(pieces[0]) if pieces else 0

    @property
    def vocab_size(self) -> int:
        return self._model.get_piece_size() + len(self._added)

    @property
    def special_ids(self) -> set[int]:
        return self._special

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        text.encode()  # a lone surrogate is an error here, not a wrong token
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
        """Yield the special tokens in `text`, searching a window at a time."""
        at = 0
        while at < len(text):
            end = at + _WINDOW_CHARS
            match = self._cut.search(text, at, end + self._longest_matched)
            if match is None or match.start() >= end:  # a longer token may begin behind the window
                at = end
            else:
                yield match
                at = match.end()

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
