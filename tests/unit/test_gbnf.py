"""GBNF grammars keep their language: the texts of ambiguous grammars, escapes, and the messages of malformed ones."""

from __future__ import annotations

import itertools
import re

import pytest
from test_schema_rewriting import Language

from quire.frontend.gbnf import gbnf_to_lark, is_gbnf
from quire.types import RequestError

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws   # a comment
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
# Grammars over the letters a and b, and regular expressions for the same language.
SAME = {
    'root ::= word "a"\nword ::= [ab]+': "[ab]+a",
    'root ::= "ab" | "a" [ab] "b"': "ab|a[ab]b",
    'root ::= "aab" | [a]* "b"': "aab|a*b",
    'root ::= (\n  "a" |\n  "b" "b"\n)*': "(a|bb)*",
    'root ::= x{2} y{0,1} | z\nx ::= "a"\ny ::= "b"\nz ::= "b"{3,}': "aab?|bbb+",
    'root ::= "" | "a" root "b" | "ab"': "(aa(ab|)bb)|ab|",
    'root ::= .  [^a]?': "[ab]b?",
    'root ::= a-1 b_2?\na-1 ::= "a"\nb_2 ::= "b" | a-1': "a[ab]?",
}  # fmt: skip


@pytest.mark.parametrize("grammar", SAME)
def test_the_language_is_the_same(grammar: str) -> None:
    language = Language(grammar=grammar)
    texts = ["".join(text) for n in range(5) for text in itertools.product("ab", repeat=n)]
    found = [text for text in texts if language.holds(text)]
    assert found == [text for text in texts if re.fullmatch(SAME[grammar], text)]


def test_arithmetic() -> None:
    language = Language(grammar=ARITHMETIC)
    assert all(map(language.holds, ["1+2=3\n", "(a +1)*2=b\nx=1\n", "a1_=\t\n7 \n"]))
    assert not any(map(language.holds, ["1+2=3", "1+=3\n", "(1=1\n", "=1\n"]))


def test_characters() -> None:
    language = Language(grammar=r'root ::= [\U00010000-\U0010FFFF] [^\x00-\x1F] "\u00e9\x41\"\\" [\]\-\\^]')
    assert language.holds('\U0010ffff漢éA"\\]') and language.holds('\U00010000 éA"\\^')
    assert not language.holds('\uffff漢éA"\\]') and not language.holds('\U0010ffff\néA"\\]')


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('main ::= "a"', "no rule 'root'"),
        ("root ::= other", "line 1: the rule 'other' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('root ::= ("a"', "a group is not closed"),
        ('root ::= "a")', "closes no group"),
        ("root ::= *", "repeats nothing"),
        ('root ::= "a"{3,2}', "ends before it begins"),
        ('root ::= "a"{,}', "needs a number"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "matches nothing"),
        ('root ::= "a', "unexpected"),
        (r'root ::= "\q"', r"unknown escape \q"),
        (r"root ::= [\U00110000]", "beyond the last character"),
        (r'root ::= "\uD800"', "surrogate"),
        ('root ::= "a" (= "b")', "unexpected"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested more than 100"),
        ('"a" root ::= "b"', "must begin with its name"),
    ],
)
def test_malformed_grammars(grammar: str, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        gbnf_to_lark(grammar)


def test_lark_is_not_taken_for_gbnf() -> None:
    assert is_gbnf('# comment\n  root ::= "a"') and not is_gbnf('start: "a ::= b"\n')
