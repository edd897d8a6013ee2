"""Regular expressions as their writers mean them.

The grammar library reads `\\d` and `\\w` as any digit and letter of Unicode. JSON Schema says that patterns are
those of ECMAScript, where they are those of ASCII, and so most people mean them.
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
    """The pattern with the classes of ECMA-262 (22.2.2.9, CharacterClassEscape) written out, also within brackets,
    which may be nested in the library's syntax."""
    return _ESCAPE.sub(lambda escape: _CLASSES.get(escape[1], escape[0]), pattern)
