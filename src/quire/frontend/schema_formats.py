"""The values of the keyword `format` that can be enforced: as the library does, by a pattern, or by numeric bounds."""

from __future__ import annotations

from typing import Any

# The library checks only the shape of some formats. These patterns also exclude 29 February in common years and
# second 60, which the parsers of most languages refuse, and host names with encoded labels (IDNA).
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_COMMON_DAY = r"[0-9]{4}-(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))"
_DATE = rf"(?:{_COMMON_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](?:[^0-9].*)?"
_LETTER = "[A-Za-z0-9-]"
_LABEL = rf"(?:{_LETTER}{{1,3}}|{_LETTER}{{2}}(?:[A-Za-z0-9]{_LETTER}|-[A-Za-z0-9]){_LETTER}*)"

# RFC 3986, without IP literals and port-like first segments.
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_SEGMENT = r"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"  # without a colon
_AUTHORITY = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*(?::[0-9]*)?"
_REST = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_PATH = rf"(?:/{_PCHAR}*)*"
_RELATIVE = rf"(?://{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?|{_SEGMENT}+{_PATH})?"
_ABSOLUTE = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}{_PATH}|/(?:{_PCHAR}+{_PATH})?|{_PCHAR}+{_PATH})?"
_URI_REFERENCE = rf"^(?:{_ABSOLUTE}|{_RELATIVE}){_REST}$"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_NAME = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+"
_VARIABLE = rf"{_NAME}(?:\.{_NAME})*(?::[1-9][0-9]{{0,3}}|\*)?"
_URI_TEMPLATE = (
    r"""^(?:[A-Za-z0-9._~:/?#\[\]@!$&()*+,;=-]|%[0-9A-Fa-f]{2}"""
    rf"""|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"""
)
# Regular expressions of common parts, with groups nested once.
_ATOM = (
    r"""(?:[A-Za-z0-9 _,:;=!@#%&~"'<>/.-]|\\[dDwWsSnrt.*+?()\[\]{}|^$\\/-]"""
    r"""|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:;@#%&/+*?]|\\[dwsnrt.\\/\]-])+\])"""
)
_COUNT = r"(?:[*+?]\??|\{[0-9]{1,3}\}|\{[0-9]{1,3},\})?"
_TERMS = rf"(?:{_ATOM}{_COUNT})*"
_GROUP = rf"\((?:\?:)?{_TERMS}(?:\|{_TERMS})*\)"
_NESTED_TERMS = rf"(?:(?:{_ATOM}|{_GROUP}){_COUNT})*"
_REGEX = rf"^\^?{_NESTED_TERMS}(?:\|{_NESTED_TERMS})*\$?$"

_LIBRARY = {
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip
_NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "url": "uri"}
_REFINED: dict[str, dict[str, Any]] = {
    "date": {"pattern": rf"^{_DATE}$"},
    "time": {"pattern": rf"^{_TIME}$"},
    "date-time": {"pattern": rf"^{_DATE}[Tt]{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
    "uri-reference": {"pattern": _URI_REFERENCE},
    "iri-reference": {"pattern": _URI_REFERENCE},
    "uri-template": {"pattern": _URI_TEMPLATE},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    "regex": {"pattern": _REGEX},
    **{f"int{bits}": {"minimum": -(2 ** (bits - 1)), "maximum": 2 ** (bits - 1) - 1} for bits in (8, 16, 32)},
    **{f"uint{bits}": {"minimum": 0, "maximum": 2**bits - 1} for bits in (8, 16, 32)},
}
# The library computes bounds in float64 and int64. This is the largest number that is exact in both.
_INT64 = 2**63 - 1024
_BOUNDED_LATE: dict[str, dict[str, Any]] = {
    "int64": {"minimum": -_INT64, "maximum": _INT64},
    "uint64": {"minimum": 0, "maximum": _INT64},
}
_ANY_NUMBER = {"float", "double"}


class FormatRule:
    """What to write for a format.

    Attributes:
        library: the format that the library gets, or None.
        also: a schema that must hold besides, or None.
        known: whether the format is enforced.
    """

    __slots__ = ("also", "known", "library")

    def __init__(self, name: Any) -> None:
        given = _NARROWER.get(name, name) if isinstance(name, str) else ""
        self.library = given if given in _LIBRARY else None
        self.also = _REFINED.get(given) or _BOUNDED_LATE.get(given)
        self.known = self.library is not None or self.also is not None or given in _ANY_NUMBER
