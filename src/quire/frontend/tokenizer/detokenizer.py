"""Token ids to text as they arrive, and stop strings in that text.

Both hold back what is not yet certain: the detokenizer the bytes of an unfinished character, `StopStrings`
the longest ending that could still become a stop string. The cost of a token does not depend on how many
came before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire.frontend.tokenizer.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")
_CONTEXT_BYTES = 3  # an unfinished UTF-8 character has at most three bytes


class Detokenizer:
    """The text that output tokens add behind a prompt.

    prompt bytes   .. e2 82            the prompt may end inside a character
    output bytes            ac 20 f0   the text begins with the character that it completes
    text                  "€ "         and what is still unfinished waits
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """Of `prompt_ids` only the end matters. `spaces_between_special_tokens` false removes the space that
        some decoders put before a special token; most put none, and then it changes nothing."""
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
        self._opening = not tail  # no text came before
        self._decoder.decode(tail[-_CONTEXT_BYTES:])

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` completed."""
        return self._decoder.decode(b"".join([self._bytes(i) for i in ids if i not in self._skipped]))

    def _bytes(self, token: int) -> bytes:
        found = self._tokenizer.token_bytes(token)
        if self._opening and found:
            self._opening = False
            found = self._tokenizer.opening_bytes(token)
        if self._joins_special:
            special = self._tokenizer.is_special(token)
            if special and self._after_special:
                found = found.removeprefix(b" ")
            self._after_special = special
        return found

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never got its end, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and lets no part of it out before.

    Of stop strings that overlap, the one that ends first wins, as it would token by token; of those that
    end together, the one that began first.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = list(dict.fromkeys(stops))
        self._include = include
        self._held = ""
        self._exempt = 0  # characters at the beginning of `_held` where no stop string may end
        self._longest = max(map(len, self._stops), default=0)
        self.stopped: str | None = None

    def skip(self, text: str) -> str:
        """Take in text in which no stop string may end, but one may begin. Return what may be shown."""
        shown = self._hold(self._held + text)
        self._exempt = len(self._held)
        return shown

    def _hold(self, text: str) -> str:
        """Keep the end of `text` that may become a stop string. Return what comes before it."""
        shown = len(text) - self._may_become(text)
        self._held, self._exempt = text[shown:], max(0, self._exempt - shown)
        return text[:shown]

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that ended it or None). After a stop nothing comes any more."""
        if not self._stops or self.stopped is not None:
            return ("" if self.stopped is not None else text), self.stopped
        held = self._held + text
        found = self._first(held)
        if found is not None:
            begin, self.stopped = found
            self._held = ""
            return held[: begin + len(self.stopped) if self._include else begin], self.stopped
        return self._hold(held), None

    def _first(self, text: str) -> tuple[int, str] | None:
        hits = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, self._exempt + 1 - len(stop)))) >= 0
        ]
        return min(hits)[1:] if hits else None

    def _may_become(self, text: str) -> int:
        """Length of the longest ending of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0

    def finish(self) -> str:
        """The text held back, now that no more comes."""
        held, self._held = self._held, ""
        return held
