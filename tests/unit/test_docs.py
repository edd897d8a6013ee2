"""Every file, flag and class that the documents name exists. Stale names are how documents begin to lie."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from quire.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = "py|md|c|h|js|html|toml|yaml|yml|json|txt|jinja|sh"
# Files that belong to the reader or to a checkpoint, not to the project.
NOT_OURS = {
    "answers.jsonl", "config.json", "config.yaml", "generation_config.json", "hf_quant_config.json", "load.svg",
    "merges.txt", "model.gguf", "prompts.jsonl", "prompts.txt", "server.yaml", "special_tokens_map.json",
    "template.jinja", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "out.json",
    "mooncake_conversation.jsonl", "sweep.png", "users.png", "prometheus.yml", "file.yaml",
}  # fmt: skip
# Flags of other programs that the documents show, and flags that are shown because they are missing.
FOREIGN_FLAGS = {
    "--build", "--profile", "--gpus", "--rm", "--name", "--ipc", "--shm-size", "--stop-timeout", "--target", "--tag",
    "--target-dir", "--build-arg", "--memory", "--init", "--no-cache", "--constraint", "--upgrade", "--editable", "--index-url",
}  # fmt: skip
# Classes and constants of the standard library, of torch or of an API.
FOREIGN_NAMES = {
    "Accept", "Authorization", "BaseException", "CUDAGraph", "ContextTokens", "DOTALL", "Exception", "GeneratedTokens",
    "Host", "None", "OpenAI", "Anthropic", "ChatOpenAI", "Origin", "Protocol", "QueueHandler", "Retry", "True", "False",
    "TIMESTAMP", "Content", "Literal", "LiteralString", "Dockerfile", "Makefile", "Deployment", "Path", "Lark",
}  # fmt: skip


def spans(document: Path) -> list[str]:
    """Return the code of a document: what stands in backticks, and fenced blocks line by line."""
    text = document.read_text(encoding="utf-8")
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return inline + [line for block in fenced for line in block.splitlines()]


@cache
def tracked() -> frozenset[str]:
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


def by_name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = {
        m[1]
        for span in spans(document)
        for m in re.finditer(rf"(?<![\w/.-])([\w./-]+\.(?:{SUFFIXES}))\b", span)
    }
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
    missing = named - known_flags() - FOREIGN_FLAGS
    assert not missing, f"{by_name(document)} names flags that do not exist: {sorted(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_classes_exist(document: Path) -> None:
    """CamelCase names, and methods behind them, in backticks."""
    named = {
        m[0]
        for span in spans(document)
        for m in re.finditer(r"(?<![\w./:-])[A-Z][a-z]+(?:[A-Z][a-z0-9]*)+\b", span)
    }
    missing = {name for name in named if name not in defined_names()} - FOREIGN_NAMES
    text = document.read_text(encoding="utf-8")
    ours = {name for name in missing if f"`{name}`" in text or f"`{name}." in text}
    assert not ours, f"{by_name(document)} names classes that do not exist: {sorted(ours)}"


def test_a_stale_name_is_noticed() -> None:
    assert not exists("core/no_such_file.py")
    assert "--no-such-flag" not in known_flags()
    assert "NoSuchClass" not in defined_names()
