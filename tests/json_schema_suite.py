"""The JSON-Schema-Test-Suite against the grammars: what is enforced, what is refused, and that nothing is enforced
wrongly. `python tests/json_schema_suite.py [TOKENIZER]` runs all of it and prints the table of
docs/STRUCTURED_OUTPUT.md.

A test of the suite is a schema, an instance and whether it is valid. The instance is written as compact JSON
in every order of its keys (some hundred at most), because a grammar fixes their order to the schema's; it is
accepted if every token of one of them is allowed by its mask, and the end after the last.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from quire.frontend.location import locate_model
from quire.frontend.structured_spec import grammar_spec
from quire.frontend.tokenizer.tokenizer import Tokenizer, load_tokenizer
from quire.grammar.checker_process import token_table
from quire.grammar.matching import Vocabulary, build_matcher, grammar_text, try_out
from quire.types import GrammarSpec, RequestError, StructuredOutputsParams

_ORDERS = 120


@dataclass
class World:
    """A tokenizer and its vocabulary."""

    path: Path = field(default_factory=lambda: locate_model("demo").path)
    close_objects: bool = False  # as JSON Schema has it
    tokenizer: Tokenizer = field(init=False)
    vocabulary: Vocabulary = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = load_tokenizer(self.path)
        self.vocabulary = Vocabulary(token_table(self.path, self.tokenizer.vocab_size))

    def spec(self, schema: Any) -> GrammarSpec:
        """Raises RequestError as the engine would."""
        return grammar_spec(
            StructuredOutputsParams(json=json.dumps(schema), disable_additional_properties=self.close_objects)
        )

    def matcher(self, spec: GrammarSpec) -> LLMatcher:
        """Raises RequestError as the engine would."""
        matcher = build_matcher(self.vocabulary, spec, grammar_text(spec))
        try_out(matcher.deep_copy(), self.vocabulary, spec)
        return matcher

    def accepts(self, matcher: LLMatcher, text: str) -> bool:
        """Return whether the masks allow the text, token by token, and then the end."""
        matcher = matcher.deep_copy()
        for token in self.tokens(text):
            if not self.allows(matcher, token) or not matcher.consume_token(token):
                return False
        return self.allows(matcher, self.vocabulary.end)

    def tokens(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.tokenizer.decode(ids) == text:
            return ids
        return self.vocabulary.tokenizer.greedy_tokenize(text)  # some tokenizers normalise

    @staticmethod
    def allows(matcher: LLMatcher, token: int) -> bool:
        return bool(matcher.compute_bitmask()[token // 8] >> token % 8 & 1)


def write_random(world: World, matcher: LLMatcher, rng: random.Random, most: int = 60) -> str | None:
    """A text of random allowed tokens, short ones and the end preferred; None if it has no end by then."""
    matcher, tokens = matcher.deep_copy(), []
    end = world.vocabulary.end
    while len(tokens) < most:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(end) if mask[i // 8] >> i % 8 & 1]
        if mask[end // 8] >> end % 8 & 1 and (not allowed or rng.random() < 0.4):
            return b"".join(map(world.tokenizer.token_bytes, tokens)).decode()
        assert allowed, matcher.get_error()
        closing = [i for i in allowed if world.tokenizer.token_bytes(i) in (b'"', b"}", b"]", b":", b'":')]
        tokens.append(rng.choice(closing if closing and len(tokens) > 20 else allowed))
        assert matcher.consume_token(tokens[-1])
    return None


def texts(value: Any, most: int = _ORDERS) -> list[str]:
    """The value as JSON with its keys in every order, up to `most` texts."""
    if isinstance(value, dict):
        found: list[str] = []
        for order in itertools.permutations(value.items()):
            parts = [
                [f"{json.dumps(k, ensure_ascii=False)}:{text}" for text in texts(v, 6)] for k, v in order
            ]
            found += [
                "{" + ",".join(chosen) + "}" for chosen in itertools.islice(itertools.product(*parts), most)
            ]
            if len(found) >= most:
                break
        return found[:most]
    if isinstance(value, list):
        parts = [texts(item, 6) for item in value]
        return ["[" + ",".join(chosen) + "]" for chosen in itertools.islice(itertools.product(*parts), most)]
    return [json.dumps(value, ensure_ascii=False)]


@dataclass
class Counts:
    schemas: int = 0
    enforced: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    valid_accepted: int = 0
    invalid_refused: int = 0
    narrower: list[str] = field(default_factory=list)  # valid, but not written this way
    wrong: list[str] = field(default_factory=list)  # invalid, yet accepted


def is_loosened(spec: GrammarSpec) -> bool:
    """Return whether a warning names a keyword that has a meaning and is not enforced."""
    return any("oneOf" in warning or "uniqueItems" in warning for warning in spec.warnings)


def run_file(world: World, path: Path, counts: Counts, loosened: Counts) -> None:
    """Count the schemas of a file; those with a warning about a keyword that is not enforced apart."""
    for case in json.loads(path.read_text()):
        counts.schemas += 1
        try:
            spec = world.spec(case["schema"])
            matcher = world.matcher(spec)
        except RequestError as error:
            counts.refused[str(error)] += 1
            continue
        tally = loosened if is_loosened(spec) else counts
        tally.enforced += 1
        for test in case["tests"]:
            name = f"{path.stem}: {case['description']}: {test['description']}"
            accepted = any(world.accepts(matcher, text) for text in texts(test["data"]))
            if test["valid"]:
                tally.valid_accepted += accepted
                tally.narrower += [] if accepted else [name]
            else:
                tally.invalid_refused += not accepted
                tally.wrong += [name] if accepted else []


PARTS = ("required", "optional/format", "optional/ecmascript-regex.json")


def suite_files(suite: Path, part: str) -> Iterator[Path]:
    place = suite if part == "required" else suite / part
    yield from [place] if place.is_file() else sorted(place.glob("*.json"))


def main() -> None:
    suite = Path(__file__).resolve().parents[2] / "shared" / "data" / "json_schema" / "draft2020-12"
    world = World(Path(sys.argv[1])) if len(sys.argv) > 1 else World()
    for part in PARTS:
        counts, loosened = Counts(), Counts()
        for path in suite_files(suite, part):
            run_file(world, path, counts, loosened)
        print(
            f"## {part}: {counts.schemas} schemas, {counts.enforced} enforced, {loosened.enforced} with a warning"
        )
        print(
            f"with a warning: valid {loosened.valid_accepted} accepted, invalid {len(loosened.wrong)} accepted"
        )
        print(f"valid {counts.valid_accepted} accepted, {len(counts.narrower)} not written this way")
        print(f"invalid {counts.invalid_refused} refused, {len(counts.wrong)} accepted")
        for name in counts.narrower:
            print("  narrower:", name)
        for name in counts.wrong:
            print("  WRONG:", name)
        reasons: Counter[str] = Counter()
        for reason, count in counts.refused.items():
            reasons[reason.split(" at #")[0][:100]] += count
        for reason, count in reasons.most_common():
            print(f"  refused {count}: {reason}")


if __name__ == "__main__":
    main()
