"""Regular expressions as their writers mean them.

JSON Schema says that patterns are those of ECMAScript, whose `\\d` and `\\w` are digits and letters of ASCII, and so most
people mean them elsewhere, too. The grammar library reads them so in schemas, but not in regular expressions alone, where
they are those of Unicode; and its `\\s` is Unicode's in both, which differs by two characters.
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
    """The pattern with the classes of ECMA-262 (CharacterClassEscape) written out, also within brackets, which may be
    nested in the library's syntax. Done again it changes nothing that is matched."""
    return _ESCAPE.sub(lambda escape: _CLASSES.get(escape[1], escape[0]), pattern)
