"""Documents agree with the code: names that they mention exist, and the guides work when followed to the letter."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from quire.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
SUFFIXES = "py|md|c|h|js|html|toml|yaml|yml|json|txt|jinja|sh"
# Files that belong to the reader or to a checkpoint, not to the project.
NOT_OURS = {
    "answers.jsonl", "config.json", "config.yaml", "generation_config.json", "hf_quant_config.json", "load.svg",
    "merges.txt", "model.gguf", "prompts.jsonl", "prompts.txt", "server.yaml", "special_tokens_map.json",
    "template.jinja", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "out.json",
    "mooncake_conversation.jsonl", "sweep.png", "growth.png", "memory.png", "ladder.html", "users.png", "prometheus.yml", "file.yaml",
}  # fmt: skip
# Flags of other programs that the documents show, and flags that are shown because they are missing.
FOREIGN_FLAGS = {
    "--build", "--profile", "--gpus", "--rm", "--name", "--ipc", "--shm-size", "--stop-timeout", "--target", "--tag",
    "--target-dir", "--build-arg", "--memory", "--init", "--no-cache", "--constraint", "--upgrade", "--editable", "--index-url",
    "--dist",
}  # fmt: skip
# Classes and constants of the standard library, of torch or of an API.
FOREIGN_NAMES = {
    "Accept", "Authorization", "BaseException", "CUDAGraph", "ContextTokens", "DOTALL", "Exception", "GeneratedTokens",
    "Host", "None", "OpenAI", "Anthropic", "ChatOpenAI", "Origin", "Protocol", "QueueHandler", "Retry", "True", "False",
    "TIMESTAMP", "Content", "Literal", "LiteralString", "Dockerfile", "Makefile", "Deployment", "Path", "Lark",
}  # fmt: skip


def spans(document: Path) -> list[str]:
    """Return the code of a document: text in backticks, and fenced blocks line by line."""
    text = document.read_text(encoding="utf-8")
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return inline + [line for block in fenced for line in block.splitlines()]


@cache
def tracked() -> frozenset[str]:
    """Return the paths of all files of the project, relative to its root."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return frozenset(listed.stdout.splitlines())


def exists(path: str) -> bool:
    """Return whether a document's path names a file: from the root, from src/quire, or the end of a path."""
    return any(name == path or name.endswith(f"/{path}") for name in tracked())


@cache
def known_flags() -> frozenset[str]:
    """Return the flags of every `quire` command and of every script in the repository."""
    flags = set()
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"quire.cli.{command}").add_arguments(parser)
        flags |= flags_of(parser)
    for name in tracked():
        if name.endswith(".py") and (ROOT / name).exists():
            source = (ROOT / name).read_text(encoding="utf-8")
            for call in re.findall(r"add_argument\(([^)]*)", source):
                flags |= set(re.findall(r'"(--[\w-]+)"', call))
    return frozenset(flags | {"--help", "--version"})


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a parser and of its subcommands."""
    found = set()
    for action in parser._actions:  # argparse has no public list of them
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= flags_of(below)
    return found


@cache
def defined_names() -> frozenset[str]:
    """Return every class, function, constant and module attribute that src/ and tests/ define."""
    names = set()
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(names)


@cache
def words() -> frozenset[str]:
    """Return every identifier-like word in the project's files other than documents."""
    found: set[str] = set()
    kinds = (".py", ".c", ".js", ".html", ".toml", ".yaml", ".yml", ".json", ".txt")
    for name in tracked():
        if name.endswith(kinds) and "demo/" not in name and (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            found.update(re.findall(r"[A-Za-z_]\w+", text))
    return frozenset(found)


def by_name(document: Path) -> str:
    """Return the path of a document as the id of a test."""
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = {
        m[1]
        for span in spans(document)
        for m in re.finditer(rf"(?<![\w/.-])([\w./-]+\.(?:{SUFFIXES}))\b", span)
    }
    named -= {edit.path for edit in edits(document) if edit.creates}
    named -= {edit.path.rsplit("/", 1)[-1] for edit in edits(document) if edit.creates}
    missing = {
        p for p in named if p.rsplit("/", 1)[-1] not in NOT_OURS and not p.startswith("/") and not exists(p)
    }
    assert not missing, f"{by_name(document)} names files that do not exist: {sorted(missing)}"
    links = {link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link}
    broken = {link for link in links if not (document.parent / link).exists()}
    assert not broken, f"{by_name(document)} links to nothing: {sorted(broken)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_flags_exist(document: Path) -> None:
    named = {flag for span in spans(document) for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", span)}
    new = " ".join(edit.new for edit in edits(document))
    named = {flag for flag in named if flag[2:].replace("-", "_") not in new}
    missing = named - known_flags() - FOREIGN_FLAGS
    assert not missing, f"{by_name(document)} names flags that do not exist: {sorted(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_classes_exist(document: Path) -> None:
    """CamelCase names in backticks are defined in src/ or tests/."""
    named = {
        m[0]
        for span in spans(document)
        for m in re.finditer(r"(?<![\w./:-])[A-Z][a-z]+(?:[A-Z][a-z0-9]*)+\b", span)
    }
    missing = {name for name in named if name not in defined_names()} - FOREIGN_NAMES
    text = document.read_text(encoding="utf-8")
    ours = {name for name in missing if f"`{name}`" in text or f"`{name}." in text}
    assert not ours, f"{by_name(document)} names classes that do not exist: {sorted(ours)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_names_exist(document: Path) -> None:
    """Names with an underscore in backticks occur in the code, such as functions, fields, settings and metrics."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    spans_inline = re.findall(r"`([^`\n]+)`", text)
    named = {
        m[0].strip("_")
        for span in spans_inline
        for m in re.finditer(r"(?<![\w/.\-{])_?[a-z]+[a-z0-9]*(?:_[a-z0-9]+)+(?![\w/]|\.\w)", span)
    }
    new = " ".join(edit.new for edit in edits(document))
    known = {word.strip("_") for word in words()}
    missing = {
        name
        for name in named
        if name not in known and re.sub("_(total|seconds)$", "", name) not in known and name not in new
    }
    assert not missing, f"{by_name(document)} names what the code does not have: {sorted(missing)}"


@dataclass(frozen=True, slots=True)
class Edit:
    """One step of a guide: a new file, or a passage of a file with its replacement."""

    path: str
    creates: bool
    old: str
    new: str


def edits(document: Path) -> list[Edit]:
    """Return the steps of a guide in order: "Create `path`:" with a file, or "In `path`:" with a diff."""
    found = []
    text = document.read_text(encoding="utf-8")
    for verb, path, body in re.findall(
        r"^(Create|In) `([^`]+)`:\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    ):
        if verb == "Create":
            found.append(Edit(path, True, "", body))
            continue
        for hunk in re.split(r"^@@\n", body, flags=re.MULTILINE):
            lines = hunk.splitlines()
            old, new = ("\n".join(line[1:] for line in lines if line[:1] in signs) for signs in (" -", " +"))
            found.append(Edit(path, False, old, new))
    return found


def apply(edit: Edit, tree: Path) -> None:
    """Carry out one step of a guide in `tree`. Raise AssertionError if it does not fit."""
    file = tree / edit.path
    if edit.creates:
        assert not file.exists(), f"{edit.path} exists already"
        file.write_text(edit.new, encoding="utf-8")
        return
    text = file.read_text(encoding="utf-8")
    # Without the line's end, a diff may leave out a comment behind its last line.
    times = text.count(edit.old + "\n") or text.count(edit.old)
    assert times == 1, f"{edit.path} has this {times} times:\n{edit.old}"
    end = "\n" if edit.old + "\n" in text else ""
    file.write_text(text.replace(edit.old + end, edit.new + end), encoding="utf-8")


def first_command(guide: Path) -> list[str]:
    """Return the arguments of the first `python -m pytest` that the guide says to run."""
    found = re.search(r"^python -m pytest (.*)$", guide.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{guide.name} runs no test"
    return shlex.split(found[1])


@pytest.mark.parametrize("guide", GUIDES, ids=by_name)
def test_guides_work_when_followed(guide: Path, tmp_path: Path) -> None:
    for name in sorted(tracked()):
        if name.startswith(("src/", "tests/", "deploy/", "pyproject.toml")) and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    steps = edits(guide)
    assert steps, f"{guide.name} has no steps"
    for step in steps:
        apply(step, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *first_command(guide)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, f"{guide.name}:\n{ran.stdout[-3000:]}{ran.stderr[-1000:]}"


def test_every_guide_is_linked() -> None:
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "ARCHITECTURE.md"):
        text = page.read_text(encoding="utf-8")
        missing = [guide.name for guide in GUIDES if f"contributing/{guide.name})" not in text]
        assert not missing, f"{page.name} does not link {missing}"


def test_a_stale_name_is_noticed(tmp_path: Path) -> None:
    assert not exists("core/no_such_file.py")
    assert "--no-such-flag" not in known_flags()
    assert "NoSuchClass" not in defined_names()
    assert "no_such_" + "name" not in words()
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(AssertionError, match="0 times"):
        apply(Edit("a.py", False, "y = 1", "y = 2"), tmp_path)
    with pytest.raises(AssertionError, match="exists already"):
        apply(Edit("a.py", True, "", "y = 2"), tmp_path)
