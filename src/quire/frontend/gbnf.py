"""Conversion of GBNF, the grammars of llama.cpp, to the Lark dialect of the grammar library.

The library splits text into lexemes with a greedy lexer before it parses, which changes the language of a grammar:
after `word ::= [a-z]+`, the literal in `root ::= word "s"` never matches, because the word has taken every letter. So
every lexeme of a converted grammar is a single character, and the parser, which follows all readings at once, does the
rest. A literal stays whole if no other lexeme begins with its first character.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from quire.types import RequestError

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<rule>[A-Za-z0-9_-]+\s*::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<chars>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<count>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[.()|*+?])""",
    re.VERBOSE,
)
_CHAR = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "^": "^", "-": "-"}
_MAX_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_MAX_GROUPS = 100  # nested
_IS_GBNF = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is written in GBNF rather than Lark."""
    return _IS_GBNF.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in Lark, with the same language.

    Raises:
        RequestError: if the grammar is malformed. The message names the line.
    """
    return _Converter(text).lark()


def _error(reason: str) -> RequestError:
    return RequestError(f"grammar is not valid GBNF: {reason}", param="structured_outputs")


@dataclass(slots=True)
class _Literal:
    text: str


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass(slots=True)
class _Group:
    """The expressions of an open group, or of a rule."""

    alternatives: list[list[str | _Literal]] = field(default_factory=lambda: [[]])


class _Converter:
    """The conversion of one grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._numbers: dict[str, int] = {}  # of rules, by name
        self._defined: dict[str, _Group] = {}
        self._used: dict[str, int] = {}  # rule names, with the first line that uses them
        self._first_chars: Counter[str] = Counter()  # of different literals
        self._literals: set[str] = set()
        self._classes: list[str] = []
        self._groups: list[_Group] = []  # groups without a name, which become rules

    def lark(self) -> str:
        self._read_rules()
        if "root" not in self._defined:
            raise _error("it has no rule 'root'")
        for name, line in self._used.items():
            if name not in self._defined:
                raise _error(f"line {line}: the rule {name[:64]!r} is not defined")
        classes = [re.compile(chars) for chars in dict.fromkeys(self._classes)]
        whole = {
            text
            for text in self._literals
            if self._first_chars[text[0]] == 1 and not any(chars.match(text[0]) for chars in classes)
        }
        lines = [f"start: {self._name('root')}"]
        for name, group in self._defined.items():
            lines.append(f"{self._name(name)}: {_written(group, whole)}")
        for number, group in enumerate(self._groups):
            lines.append(f"group_{number}: {_written(group, whole)}")
        return "\n".join([*lines, ""])

    def _name(self, rule: str) -> str:
        return f"rule_{self._numbers.setdefault(rule, len(self._numbers))}"

    def _read_rules(self) -> None:
        open_groups: list[_Group] = []
        for token in self._tokens:
            if token.kind == "rule":
                if len(open_groups) > 1:
                    raise _error(f"line {token.line}: a group is not closed")
                name = token.text.removesuffix("::=").strip()
                if name in self._defined:
                    raise _error(f"line {token.line}: the rule {name[:64]!r} is defined twice")
                self._defined[name] = _Group()
                open_groups = [self._defined[name]]
            elif not open_groups:
                raise _error(f"line {token.line}: a rule must begin with its name and ::=")
            else:
                self._read(token, open_groups)
        if len(open_groups) > 1:
            raise _error("a group is not closed")

    def _read(self, token: _Token, open_groups: list[_Group]) -> None:
        sequence = open_groups[-1].alternatives[-1]
        if token.kind == "name":
            self._used.setdefault(token.text, token.line)
            sequence.append(self._name(token.text))
        elif token.kind == "literal":
            sequence.append(self._literal(token))
        elif token.kind == "chars" or token.text == ".":
            sequence.append(self._class(token))
        elif token.text == "|":
            open_groups[-1].alternatives.append([])
        elif token.text == "(":
            if len(open_groups) > _MAX_GROUPS:
                raise _error(f"line {token.line}: groups are nested more than {_MAX_GROUPS} deep")
            open_groups.append(_Group())
        elif token.text == ")":
            if len(open_groups) == 1:
                raise _error(f"line {token.line}: ')' closes no group")
            self._groups.append(open_groups.pop())
            open_groups[-1].alternatives[-1].append(f"group_{len(self._groups) - 1}")
        else:
            self._repeat(token, sequence)

    def _repeat(self, token: _Token, sequence: list[str | _Literal]) -> None:
        if not sequence:
            raise _error(f"line {token.line}: {token.text} repeats nothing")
        count = re.sub(r"\s", "", token.text)
        if token.kind == "count":
            least, _, most = count[1:-1].partition(",")
            if not least and not most:
                raise _error(f"line {token.line}: {token.text} needs a number")
            if most and int(most) < int(least or 0):
                raise _error(f"line {token.line}: {token.text} ends before it begins")
            count = f"{{{least or 0},{most}}}" if "," in count else f"{{{least},{least}}}"
        self._groups.append(_Group([[sequence.pop()]]))
        sequence.append(f"group_{len(self._groups) - 1}{count}")

    def _literal(self, token: _Token) -> _Literal | str:
        text = "".join(chr(code) for code, _ in _codes(token.text[1:-1], token.line))
        if any(ord(char) in _SURROGATES for char in text):
            raise _error(f"line {token.line}: a literal holds half of a surrogate pair")
        if not text:
            return '""'
        if text not in self._literals:
            self._literals.add(text)
            self._first_chars[text[0]] += 1
        return _Literal(text)

    def _class(self, token: _Token) -> str:
        if token.text == ".":
            found = "[\\U00000000-\\U0010ffff]"
            self._classes.append(found)
            return _lark_class(False, [(0, _MAX_CODE)])
        body = token.text[1:-1]
        negated = body.startswith("^")
        codes = _codes(body[negated:], token.line)
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(codes):
            low, high = codes[at][0], codes[at][0]
            if at + 2 < len(codes) and codes[at + 1] == (ord("-"), False):
                high = codes[at + 2][0]
                at += 2
            if high < low:
                raise _error(f"line {token.line}: a range in {token.text[:64]} ends before it begins")
            ranges.append((low, high))
            at += 1
        if not ranges and not negated:
            raise _error(f"line {token.line}: [] matches nothing")
        inner = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
        self._classes.append(f"[{'^' if negated else ''}{inner}]" if ranges else "[\\U00000000-\\U0010ffff]")
        return _lark_class(negated, ranges)


def _tokens(text: str) -> list[_Token]:
    tokens, at, line = [], 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _error(f"line {line}: unexpected {text[at : at + 20]!r}")
        if found.lastgroup != "space":
            tokens.append(_Token(str(found.lastgroup), found[0], line))
        line += found[0].count("\n")
        at = found.end()
    return tokens


def _codes(body: str, line: int) -> list[tuple[int, bool]]:
    """Return the code points of a literal or class, and whether each is escaped."""
    codes = []
    for found in _CHAR.finditer(body):
        digits = found[1] or found[2] or found[3]
        if digits:
            code = int(digits, 16)
        elif found[4] is not None:
            if found[4] not in _ESCAPES:
                raise _error(f"line {line}: unknown escape \\{found[4]}")
            code = ord(_ESCAPES[found[4]])
        else:
            code = ord(found[5])
        if code > _MAX_CODE:
            raise _error(f"line {line}: {found[0]} is beyond the last character, \\U0010FFFF")
        codes.append((code, found[5] is None))
    return codes


def _lark_class(negated: bool, ranges: list[tuple[int, int]]) -> str:
    """Return a character class as a regular expression. Surrogates are left out, because no text contains them."""
    parts = []
    for low, high in ranges:
        low = _SURROGATES.stop if low in _SURROGATES else low
        high = _SURROGATES.start - 1 if high in _SURROGATES else high
        if low <= high:
            parts.append(f"\\u{{{low:x}}}-\\u{{{high:x}}}")
    if not parts:
        if not negated:
            raise _error("a character class holds only surrogates")
        return "/[\\u{0}-\\u{10ffff}]/"
    return f"/[{'^' if negated else ''}{''.join(parts)}]/"


def _written(group: _Group, whole: set[str]) -> str:
    return " | ".join(
        " ".join(_lexemes(part, whole) if isinstance(part, _Literal) else part for part in sequence) or '""'
        for sequence in group.alternatives
    )


def _lexemes(literal: _Literal, whole: set[str]) -> str:
    if literal.text in whole:
        return f"/{''.join(map(_escaped, literal.text))}/"
    return " ".join(f"/{_escaped(char)}/" for char in literal.text)


def _escaped(char: str) -> str:
    return f"\\u{{{ord(char):x}}}"
