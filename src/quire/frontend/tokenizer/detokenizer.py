"""Incremental detokenization, and the search for stop strings in its text.

Both hold back what is not certain yet: the detokenizer the bytes of an incomplete character, `StopStrings` the longest
suffix that could become a stop string. The cost per token does not depend on the length of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire.frontend.tokenizer.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")
_CONTEXT_BYTES = 3  # an unfinished UTF-8 character has at most three bytes


class Detokenizer:
    """A decoder of the output tokens of one request.

    prompt bytes   .. e2 82            the prompt may end inside a character
    output bytes            ac 20 f0   the text begins with the character that they complete
    text                  "€ "         f0 is held back until its character is complete

    Args:
        tokenizer: the model's tokenizer.
        prompt_ids: the prompt, of which only the last bytes matter.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False removes the space that some decoders write between two special tokens.
            Most write none, and then it has no effect.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._joins_special = not spaces_between_special_tokens and not skip_special_tokens
        self._after_special = False
        self._decoder = _utf8("replace")
        tail = b""
        for token in reversed(prompt_ids):
            if len(tail) >= _CONTEXT_BYTES:
                break
            if token not in self._skipped:
                tail = tokenizer.token_bytes(token) + tail
        self._opening = not tail  # the text has not begun
        self._decoder.decode(tail[-_CONTEXT_BYTES:])

    def push(self, ids: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        return self._decoder.decode(b"".join([self._bytes(i) for i in ids if i not in self._skipped]))

    def _bytes(self, token: int) -> bytes:
        data = self._tokenizer.token_bytes(token)
        if self._opening and data:
            self._opening = False
            data = self._tokenizer.opening_bytes(token)
        if self._joins_special:
            special = self._tokenizer.is_special(token)
            if special and self._after_special:
                data = data.removeprefix(b" ")
            self._after_special = special
        return data

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """An incremental search for the first stop string in a text.

    Text that could be the beginning of a stop string is held back. Of overlapping stop strings the one that ends first
    wins, as it would token by token; of those that end together, the one that begins first.

    Args:
        stops: the stop strings.
        include: whether the text ends with the stop string or before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = list(dict.fromkeys(stops))
        self._include = include
        self._held = ""
        self._exempt = 0  # characters at the beginning of `_held` where no stop string may end
        self._longest = max(map(len, self._stops), default=0)
        self.stopped: str | None = None

    def skip(self, text: str) -> str:
        """Append text in which a stop string may begin but not end. Return the text released."""
        released = self._hold(self._held + text)
        self._exempt = len(self._held)
        return released

    def _hold(self, text: str) -> str:
        """Hold back the suffix of `text` that may become a stop string. Return the text before it."""
        end = len(text) - self._partial_length(text)
        self._held, self._exempt = text[end:], max(0, self._exempt - end)
        return text[:end]

    def push(self, text: str) -> tuple[str, str | None]:
        """Append text.

        Returns:
            The text released, and the stop string that ended it or None. After a stop, only ("", that stop string).
        """
        if not self._stops or self.stopped is not None:
            return ("" if self.stopped is not None else text), self.stopped
        held = self._held + text
        match = self._first(held)
        if match is not None:
            begin, self.stopped = match
            self._held = ""
            return held[: begin + len(self.stopped) if self._include else begin], self.stopped
        return self._hold(held), None

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return the position and text of the stop string that ends first, or None."""
        hits = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, self._exempt + 1 - len(stop)))) >= 0
        ]
        return min(hits)[1:] if hits else None

    def _partial_length(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0

    def finish(self) -> str:
        """Return the text held back. Call it once, at the end of the text."""
        held, self._held = self._held, ""
        return held
