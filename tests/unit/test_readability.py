"""Limits on how the code base reads, measured by tools/readability.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutate  # noqa: E402
import readability  # noqa: E402

MIN_IMPERATIVE = 0.85  # of the function docstrings in src/quire
MAX_PRIVATE_READS = 40  # of other objects' private attributes, in tests
README_TOLERANCE = 0.05  # between a line count in README.md and the measured one

COUNTED = r"(?P<engine>[\d,]+) lines of code for engine, models and kernels, (?P<total>[\d,]+) in all"


def measure(name: str) -> readability.Measure:
    """Return the measure of this name."""
    return next(measure for measure in readability.measures() if measure.name == name)


def test_docstrings_open_with_an_imperative_verb() -> None:
    wrong = measure("function docstrings that do not open with an imperative verb")
    assert wrong.hits <= (1 - MIN_IMPERATIVE) * wrong.total, "\n".join(wrong.places)


def test_a_name_has_one_meaning() -> None:
    assert measure("class and alias names with several meanings").places == []


def test_tests_read_few_private_attributes() -> None:
    reads = measure("reads of private attributes in tests")
    assert reads.hits <= MAX_PRIVATE_READS, "\n".join(reads.places)


def test_readme_counts_lines_as_the_script_does() -> None:
    """The README gives two counts: of the packages that make up the engine, and of all code."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    stated = re.search(COUNTED, text)
    assert stated is not None, f"README.md does not state its line counts as {COUNTED!r}"
    lines = readability.code_lines()
    measured = {
        "engine": sum(lines.get(part, 0) for part in readability.ENGINE),
        "total": sum(lines.values()),
    }
    for name, count in measured.items():
        figure = int(stated[name].replace(",", ""))
        assert figure == pytest.approx(count, rel=README_TOLERANCE), (
            f"{name}: {figure} stated, {count} measured"
        )


def test_a_docstring_without_a_verb_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure finds a noun phrase in a function, and allows one in a property, a class and a kernel."""
    source = '''
class Tile:
    """A tile."""

    def width(self) -> int:
        """The width."""

    def height(self) -> int:
        """Return the height."""

    @property
    def area(self) -> int:
        """The area."""

@triton.jit
def _called(x):
    """x [BLOCK]."""

@kernel(do_not_specialize=["rows"])
def _launched(x):
    """Grid (rows)."""
'''
    folder = tmp_path / "src" / "quire"
    folder.mkdir(parents=True)
    (folder / "tile.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(readability, "ROOT", tmp_path)
    monkeypatch.setattr(readability, "SRC", folder)
    wrong = readability.docstrings()[0]
    assert (wrong.hits, wrong.total) == (1, 2)
    assert wrong.places == ["src/quire/tile.py:5 The width."]


def test_code_lines_leave_out_comments_and_docstrings(tmp_path: Path) -> None:
    source = '"""A module.\n\nOf two paragraphs.\n"""\n\n# A comment.\nx = (\n    1\n)\n'
    source += 'async def f():\n    """Do nothing."""\n    pass\n'
    (tmp_path / "part.py").write_text(source, encoding="utf-8")
    assert readability.code_lines(tmp_path) == {"part": 5}


def test_mutation_testing_names_existing_packages_and_tests() -> None:
    for package, tests in mutate.TESTS.items():
        assert (ROOT / "src" / "quire" / package).is_dir()
        assert [test for test in tests if not (ROOT / "tests" / test).is_file()] == []
