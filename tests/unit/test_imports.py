"""Which part may import which: the table of docs/ARCHITECTURE.md, checked against the code with `ast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "quire"

# What each part may import of Quire; a part may always import itself.
MAY_IMPORT = {
    "types": set(),
    "config": {"types", "config_rules"},
    "config_rules": {"types", "config"},
    "files": {"types"},
    "compilers": set(),
    "compile_process": {"kernels"},
    "kernels": {"compilers"},
    "parallel": {"types", "kernels"},
    "attention": {"types", "kernels"},
    "quant": {"types", "kernels", "parallel", "layers"},
    "layers": {"types", "kernels", "parallel", "attention", "quant"},
    "models": {"types", "files", "layers", "attention", "quant", "parallel"},
    "sampling": {"types", "kernels"},
    "speculation": {"types", "kernels", "attention", "models"},
    "core": {"types"},
    "worker": {"types", "compilers", "models", "sampling", "speculation", "attention", "layers", "parallel", "quant", "kernels"},
    "frontend": {"types", "config", "core", "files"},
    "grammar": {"types", "core", "files", "frontend"},
    "bench": {"types", "config", "core", "wiring", "worker", "frontend", "models", "host", "assembly", "llm", "kernels",
              "attention", "layers", "files"},
    "assembly": {"types", "config", "config_rules", "frontend", "worker", "models", "attention", "layers", "parallel", "quant", "kernels",
                 "speculation", "files"},
    "rank": {"types", "compilers", "config", "worker", "models", "layers", "parallel", "kernels", "assembly", "wiring"},
    "host": {"types", "compilers", "config", "core", "worker", "models", "frontend", "grammar", "rank", "ranks", "wiring",
             "disaggregation"},
    "ranks": {"types", "compilers", "config", "frontend", "parallel"},
    "disaggregation": {"types", "config", "frontend"},
    "rank_process": {"types", "compilers", "frontend", "models", "worker", "wiring", "rank", "ranks", "start"},
    "start": {"types", "compilers", "config", "core", "host", "ranks"},
    "serve": {"types", "config", "frontend"},
    "ray": {"types", "config", "frontend", "serve"},
    "wiring": {"types", "config", "core"},
    "dry_run": {"types", "config", "core", "worker", "models", "frontend", "wiring"},
    "engine_process": {"types", "core", "frontend", "start", "dry_run"},
    "llm": {"types", "config", "frontend", "start"},
    "cli": {"types", "config", "frontend", "host", "assembly", "llm", "models", "worker", "bench", "serve", "kernels", "quant", "ray"},
}  # fmt: skip
NO_TORCH = {
    "types",
    "files",
    "compilers",
    "config",
    "config_rules",
    "core",
    "frontend",
    "serve",
    "wiring",
    "dry_run",
    "grammar",
}  # at run time; cli imports it only inside functions
ENVIRONMENT = {"config", "cli"}
# What host.py and rank.py hand objects and values to: settings are read above, in one place.
BELOW_RANK = {
    "types", "files", "kernels", "parallel", "attention", "quant", "layers", "models", "sampling", "core", "worker",
    "grammar", "speculation",
}  # fmt: skip
SETTINGS = {"EngineConfig", "ServeConfig"}


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_follow_the_table(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    tree = ast.parse(path.read_text())
    for name in imports(tree):
        top, _, rest = name.partition(".")
        if top == "quire" and rest:
            target = rest.split(".")[0]
            allowed = target == part or target in MAY_IMPORT[part] or target == "__version__"
            assert allowed, f"{part} must not import quire.{target}"
        assert not (top in ("torch", "triton") and part in NO_TORCH), f"{part} must not import {top}"
        assert top != "transformers", "no transformers at run time"
    if part not in ENVIRONMENT:
        reads = [
            n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
        ]
        assert not reads, f"{part} must not read the environment"


def names_used(tree: ast.AST) -> set[str]:
    """Return every name and attribute in the code, and the last part of every imported name."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {name.rpartition(".")[2] for name in imports(tree)}


@pytest.mark.parametrize("part", sorted(BELOW_RANK))
def test_nothing_below_the_rank_reads_settings(part: str) -> None:
    """Not even an annotation names them: parts get the values that they need."""
    assert not MAY_IMPORT[part] & {
        "config",
        "host",
        "rank",
        "assembly",
        "start",
        "dry_run",
        "llm",
        "serve",
        "cli",
    }
    for path in sorted((SRC / part).rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert not any(name.startswith("quire.config") for name in imports(tree)), f"{path} imports settings"
        assert not SETTINGS & names_used(tree), f"{path} reads settings"


def test_host_side_starts_without_torch() -> None:
    code = (
        "import sys, quire.llm, quire.core.engine, quire.frontend.client.process, quire.cli.main, quire.bench.host, "
        "quire.serve.http.server, quire.dry_run; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "module", ["quire", "quire.llm", "quire.cli.serve", "quire.serve.http.server", "quire.cli.chat"]
)
def test_only_a_chat_in_a_terminal_imports_the_libraries_of_terminals(module: str) -> None:
    code = f"import sys, {module}; spare = {{'prompt_toolkit', 'rich', 'tqdm'}} & sys.modules.keys(); assert not spare, spare"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_imports_only_what_it_needs() -> None:
    code = (
        "import sys, quire; llm = quire.LLM('demo', device='cpu', kv_cache_memory=1 << 24); "
        "llm.generate('Once', quire.SamplingParams(max_tokens=2), use_tqdm=False); "
        "spare = {'jinja2', 'sentencepiece', 'gguf', 'huggingface_hub', "
        "'transformers', 'triton', 'sympy', 'torch._dynamo', 'torch._inductor'} & sys.modules.keys(); "
        "assert not spare, spare"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
