r"""Regular expressions with the character classes of ECMAScript.

JSON Schema patterns are those of ECMAScript, whose `\d` and `\w` match only ASCII digits and letters. Most authors
of plain regular expressions expect the same. The grammar library follows ECMAScript only in schemas; in plain regular
expressions its classes are those of Unicode. Its `\s` is that of Unicode in both and differs by two characters.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[[\s--\x85]\uFEFF]",
    "S": r"[^[\s--\x85]\uFEFF]",
}


def with_ecma_classes(pattern: str) -> str:
    r"""Replace the classes `\d`, `\w`, `\s` and their negations by the sets of ECMA-262 (CharacterClassEscape).

    This also works inside brackets, because the library's syntax allows nested ones. Applying the function twice does
    not change what the pattern matches.
    """
    return _ESCAPE.sub(lambda escape: _CLASSES.get(escape[1], escape[0]), pattern)
