"""Measure how the code base reads: docstrings, names, layout and size.

    python tools/readability.py              # print the table
    python tools/readability.py --offenders  # and list every place that a measure counts

`tests/unit/test_readability.py` holds the limits. Function docstrings follow PEP 257: the first word is a verb in
the imperative mood.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "quire"
ENGINE = (
    "__init__", "attention", "config", "core", "files", "host", "kernels", "layers", "llm", "models", "parallel",
    "quant", "rank", "ranks", "sampling", "types", "worker",
)  # fmt: skip

WORDS = """
    abort accept accumulate activate add adapt admit advance aggregate align allocate allow annotate answer append apply
    arrange ask assemble assert assign attach attend await balance begin bind block book bound broadcast buffer build
    cache calculate call cancel capture cast catch change charge check choose clamp classify clean clear clip clone
    close collect combine commit compare compile complete compose compress compute concatenate configure confirm
    connect construct consume continue convert copy count cover crawl create cut deactivate decide declare decode
    decompress deduplicate defer define delay delegate delete deliver dequantize derive describe deserialize detach
    detect determine discard disconnect dispatch display divide do download drain draw drive drop dump emit enable
    encode end enforce enqueue ensure enter enumerate escape estimate evaluate evict examine exclude execute exit
    expand expect explain export expose express extend extract fail feed fetch fill filter finalize find finish fit
    flatten flush fold follow forget form format forward free freeze fuse gather generate get give grant group grow
    guard guess handle hand hash have hide hold ignore implement import include increment index infer initialize
    inject insert inspect install interpret interrupt invert invoke issue iterate join judge keep kill label launch
    lay leave let limit link list listen load locate lock log look lookup lower make map mark mask match materialize
    measure merge mix move multiply mutate name narrow normalize note notify number observe offer open order
    overwrite pack pad pair parse partition pass patch pause perform permute pick place plan plot point poll pool pop
    post precompute predict preempt prepare present preserve print probe process produce profile project propose
    prove provide publish pull push put quantize query queue raise rank read reap rebuild receive recognize record
    recover reduce refer refresh refuse register reject relay release reload remove rename render reorder repack
    repair repeat replace replay reply report represent request require reserve reset reshape resolve respond restart
    restore restrict resume retire return reuse revert rewind rewrite roll rotate round route run sample save say
    scale scan scatter schedule score search seed select send separate serialize serve set settle shape shard share
    shift show shuffle shut shutdown sign signal simulate skip sleep slice solve sort spawn split stage stamp stand
    start state stop store stream strip submit subtract sum summarize supply switch synchronize take tell terminate
    test throw time tokenize trace track train transfer transform translate transpose traverse treat trim try
    truncate turn undo unlink unpack update upgrade upload use validate verify view visit wait wake walk warm warn
    watch weigh widen wire withdraw work wrap write yield zero
    """
VERBS = frozenset(WORDS.split())
# Names with a leading underscore that are public, of ctypes structures and of named tuples.
PUBLIC = frozenset({"_fields_", "_fields", "_replace", "_asdict", "_make"})


@dataclass
class Measure:
    """A row of the table: the number of hits, the number of candidates, and the places of the hits."""

    name: str
    total: int = 0
    places: list[str] = field(default_factory=list)

    @property
    def hits(self) -> int:
        return len(self.places)


def python_files(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def first_word(docstring: str) -> str:
    words = docstring.split()
    return words[0].strip("`*.,:;()").lower() if words else ""


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function reads like an attribute; PEP 257 asks for a noun phrase there."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property"})


def docstrings() -> list[Measure]:
    """Measure function docstrings that do not open with a verb, and those with sections."""
    wrong = Measure("function docstrings that do not open with an imperative verb")
    sections = Measure("docstrings with an Args, Returns or Raises section")
    for path, tree in python_files(SRC):
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            docstring = ast.get_docstring(node)
            if docstring is None:
                continue
            if any(f"{title}:\n" in docstring for title in ("Args", "Returns", "Raises")):
                sections.places.append(where(path, node))
            if isinstance(node, ast.ClassDef) or is_property(node) or kernel(node):
                continue
            wrong.total += 1
            if first_word(docstring) not in VERBS:
                wrong.places.append(f"{where(path, node)} {docstring.splitlines()[0]}")
    return [wrong, sections]


def kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a Triton kernel, whose docstring begins with its shapes."""
    decorators = [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]
    return any(decorator in ("triton.jit", "kernel") for decorator in decorators)


def names() -> list[Measure]:
    """Measure class and alias names with several meanings, and file names that occur more than once."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in python_files(SRC):
        if path.name != "__init__.py":
            files[path.name].append(str(path.relative_to(ROOT)))
        for node in tree.body:
            for name in top_level_names(node):
                defined[name].append(where(path, node))
    several = Measure("class and alias names with several meanings", len(defined))
    several.places = [f"{name}: {', '.join(found)}" for name, found in defined.items() if len(found) > 1]
    repeated = Measure("file names that occur more than once", len(files))
    repeated.places = [f"{name}: {', '.join(found)}" for name, found in files.items() if len(found) > 1]
    return [several, repeated]


def top_level_names(node: ast.stmt) -> Iterator[str]:
    """Yield the class or type alias that a statement at module level defines."""
    if isinstance(node, ast.ClassDef):
        yield node.name.lstrip("_")
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id.lstrip("_")
        if name[:1].isupper() and not name.isupper():
            yield name


def folders(most: int = 15) -> Measure:
    """Measure folders with more than `most` Python files side by side."""
    full = Measure(f"folders with more than {most} files")
    for folder in sorted({path.parent for path in SRC.rglob("*.py")}):
        full.total += 1
        count = len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        if count > most:
            full.places.append(f"{folder.relative_to(ROOT)}: {count}")
    return full


def private_reads() -> Measure:
    """Measure the places where tests read private attributes of other objects."""
    reads = Measure("reads of private attributes in tests")
    for path, tree in python_files(ROOT / "tests"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr in PUBLIC:
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if not node.attr.startswith("__") and owner not in ("self", "cls"):
                reads.places.append(f"{where(path, node)} {ast.unparse(node)}")
    return reads


def code_lines(folder: Path = SRC) -> dict[str, int]:
    """Count lines of code by part: no blank lines, comments or docstrings. C and JavaScript count non-blank lines."""
    lines: dict[str, int] = defaultdict(int)
    for path, tree in python_files(folder):
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        lines[part] += len(lines_of_code(path.read_text(encoding="utf-8"), tree))
    for path in (path for kind in ("c", "h", "js") for path in folder.rglob(f"*.{kind}")):
        text = path.read_text(encoding="utf-8").splitlines()
        lines[path.relative_to(folder).parts[0]] += sum(bool(line.strip()) for line in text)
    return dict(lines)


def lines_of_code(source: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold code."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            used.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return used


def measures() -> list[Measure]:
    """Return all measures in the order of the table."""
    return [*docstrings(), *names(), folders(), private_reads()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--offenders", action="store_true", help="list every place that a measure counts")
    args = parser.parse_args()
    for measure in measures():
        share = f" of {measure.total} ({measure.hits / measure.total:.0%})" if measure.total else ""
        print(f"{measure.name:<62} {measure.hits}{share}")
        for place in measure.places if args.offenders else ():
            print(f"    {place}")
    lines = code_lines()
    engine = sum(lines.get(part, 0) for part in ENGINE)
    print(f"lines of code {sum(lines.values()):,}, of these engine, models and kernels {engine:,}: ", end="")
    print(", ".join(f"{part} {count:,}" for part, count in sorted(lines.items())))


if __name__ == "__main__":
    main()
