"""Change one operator at a time and check that a test fails: seeded mutation testing.

    python tools/mutate.py --count 100 --seed 0             # random mutants over all packages
    python tools/mutate.py --package core --count 20

A mutant is the source tree with one change: another comparison, arithmetic or logical operator, another constant,
a negated condition, or a dropped call. It is *killed* if the package's tests fail or exceed the time limit, and
*survives* otherwise. Every mutant is printed with its file, its line, and the line before and after. Classes that
need a GPU are not mutated, because their tests do not run here.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The tests that must fail when a package is mutated, fastest first. Paths are relative to tests/.
TESTS = {
    "core": ["unit/test_scheduler.py", "unit/test_waiting.py", "unit/test_shared.py", "unit/test_shares.py",
             "unit/test_clocks.py", "unit/test_live.py", "e2e/test_llm.py"],
    "worker": ["unit/test_sizing.py", "unit/test_worker.py", "unit/test_graphs.py", "unit/test_recorded.py",
               "unit/test_scheduler.py", "e2e/test_llm.py"],
    "sampling": ["unit/test_sampling.py", "unit/test_sampling_on_cpu.py"],
    "grammar": ["unit/test_grammar.py", "unit/test_grammar_checker.py", "unit/test_structured.py"],
    "layers": ["unit/test_spec.py", "golden/test_families.py", "unit/test_attention.py"],
}  # fmt: skip
NEEDS_GPU = {"CudaGraphs", "KernelBatcher"}
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+", ast.BitAnd: "|", ast.BitOr: "&",
    ast.LShift: ">>", ast.RShift: "<<", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """Replace the text between two offsets of a file."""

    path: Path
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def describe(self, source: str) -> str:
        line = source.count("\n", 0, self.start)
        changed = self.apply(source)
        before, after = source.splitlines()[line].strip(), changed.splitlines()[line].strip()
        return f"{self.path}:{line + 1}\n    - {before}\n    + {after}"


class Offsets:
    """Translate positions of the syntax tree, which count bytes in a line, to offsets in the text."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        prefix = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(prefix)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    offsets = Offsets(source)
    for node in code_nodes(ast.parse(source)):
        for start, end, text in changes(node, source, offsets):
            yield Mutant(path, start, end, text)


def code_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes that run: no annotations, assertions, or classes that need a GPU."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Assert, ast.Raise, ast.JoinedStr)):
                continue
            if isinstance(child, ast.ClassDef) and child.name in NEEDS_GPU:
                continue
            yield child
            yield from code_nodes(child)


def changes(node: ast.AST, source: str, offsets: Offsets) -> Iterator[tuple[int, int, str]]:
    """Yield a (start, end, replacement) for each mutation of a node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield between(left, right, op, source, offsets)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield between(left, right, op, source, offsets)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield between(left, right, op, source, offsets)
        case ast.Constant(value=bool() as value):
            yield (*offsets.span(node), str(not value))
        case ast.Constant(value=int() as value):
            yield (*offsets.span(node), str(value + 1))
        case ast.UnaryOp(op=ast.Not()):
            start = offsets.span(node)[0]
            yield start, start + len("not"), ""
        case ast.If(test=test) | ast.While(test=test):
            start, end = offsets.span(test)
            yield start, end, f"not ({source[start:end]})"
        case ast.Expr(value=ast.Call()):
            yield (*offsets.span(node), "pass")


def between(
    left: ast.expr, right: ast.expr, op: ast.AST, source: str, offsets: Offsets
) -> tuple[int, int, str]:
    """Return the (start, end, replacement) that swaps the operator between two operands, parentheses untouched."""
    start, end = offsets.span(left)[1], offsets.span(right)[0]
    text = source[start:end]
    sign = operator_text(op)
    first = text.index(sign)
    return start + first, start + first + len(sign), SWAPS[type(op)]


def operator_text(op: ast.AST) -> str:
    """Return the source text of an operator."""
    if isinstance(op, ast.boolop):
        return "and" if isinstance(op, ast.And) else "or"
    left, right = ast.Name("a"), ast.Name("b")
    node = ast.Compare(left, [op], [right]) if isinstance(op, ast.cmpop) else ast.BinOp(left, op, right)  # type: ignore[list-item, arg-type]
    return ast.unparse(node)[1:-1].strip()


def run_tests(tree: Path, tests: list[str], limit_s: float) -> bool:
    """Return whether the tests pass with the package in `tree`."""
    path = os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    for test in tests:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            f"tests/{test}",
        ]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=limit_s, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0:
            return False
    return True


def passing(packages: list[str], pool: Executor, limit_s: float) -> dict[str, list[str]]:
    """Return the test files of each package that pass without a mutant: the others could kill anything."""
    files = sorted({test for package in packages for test in TESTS[package]})
    passes = dict(zip(files, pool.map(lambda test: run_tests(ROOT, [test], limit_s), files)))
    for test in files:
        if not passes[test]:
            print(f"not used, because it fails without a mutant: {test}", flush=True)
    return {package: [test for test in TESTS[package] if passes[test]] for package in packages}


def judge(mutant: Mutant, tests: list[str], limit_s: float) -> bool:
    """Return whether the tests kill the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
        file = tree / mutant.path
        file.write_text(mutant.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
        return not run_tests(tree, tests, limit_s)


def choose(packages: list[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Return `count` distinct mutants, drawn with the seed."""
    found = []
    for package in packages:
        for path in sorted((ROOT / "src" / "quire" / package).rglob("*.py")):
            found += [(package, mutant) for mutant in mutants_of(path.relative_to(ROOT))]
    return random.Random(seed).sample(found, min(count, len(found)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300, help="seconds for each test file")
    parser.add_argument("--jobs", type=int, default=1, help="mutants to test at a time")
    args = parser.parse_args()
    chosen = choose(args.package, args.count, args.seed)
    with ThreadPoolExecutor(args.jobs) as pool:
        useful = passing(sorted({package for package, _ in chosen}), pool, args.limit)
        survivors = 0
        verdicts = pool.map(lambda one: judge(one[1], useful[one[0]], args.limit), chosen)
        for number, ((_, mutant), killed) in enumerate(zip(chosen, verdicts), 1):
            survivors += not killed
            source = (ROOT / mutant.path).read_text(encoding="utf-8")
            verdict = "killed" if killed else "SURVIVED"
            print(f"{number}/{len(chosen)} {verdict} {mutant.describe(source)}", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - survivors} killed, {survivors} survived (seed {args.seed})")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
