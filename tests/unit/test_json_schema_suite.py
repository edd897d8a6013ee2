"""The JSON-Schema-Test-Suite against the masks of a real vocabulary; see json_schema_suite.py."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from json_schema_suite import PARTS, Counts, World, is_loosened, run_file, suite_files, write_random
from quire.types import RequestError


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def suite(data: Path) -> Path:
    return data / "json_schema" / "draft2020-12"


EXPECTED = {
    "required": (383, 221, 514, 29, 5),
    "optional/format": (28, 28, 294, 82, 0),
    "optional/ecmascript-regex.json": (20, 18, 32, 2, 0),
}


@pytest.mark.parametrize("part", PARTS)
def test_nothing_invalid_is_accepted(world: World, suite: Path, part: str) -> None:
    counts, loosened = Counts(), Counts()
    for path in suite_files(suite, part):
        run_file(world, path, counts, loosened)
    assert not counts.wrong, counts.wrong
    got = (counts.schemas, counts.enforced, counts.valid_accepted, len(counts.narrower), loosened.enforced)
    assert got == EXPECTED[part], "the table of docs/STRUCTURED_OUTPUT.md has changed"
    assert all(reason.startswith("json") for reason in counts.refused)


def test_random_texts_are_valid(world: World, suite: Path) -> None:
    """Whatever the masks let through is valid in the eyes of another library."""
    rng = random.Random(0)
    written: Counter[bool] = Counter()
    for path in suite_files(suite, "required"):
        for case in json.loads(path.read_text()):
            if "\\p{" in json.dumps(case["schema"]).replace("\\\\", "\\"):
                continue  # not in Python's regular expressions, which the validator uses
            try:
                spec = world.spec(case["schema"])
                matcher = world.matcher(spec)
            except RequestError:
                continue
            if is_loosened(spec):
                continue
            validator = jsonschema.Draft202012Validator(
                case["schema"], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            for _ in range(3):
                text = write_random(world, matcher, rng)
                written[text is not None] += 1
                if text is not None:
                    validator.validate(json.loads(text))
    assert written[True] > 300
