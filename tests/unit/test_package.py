"""The package and its surroundings: metadata, contents, workflows, systemd unit and alert rules."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import quire
from quire.cli.serve import add_arguments

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_work_on_the_index(hook: ModuleType) -> None:
    text = "[A](docs/A.md) ![shot](docs/a.png) [web](https://x.example) [here](#use-it)"
    url = "https://git.example/q"
    assert hook.with_absolute_links(text, url) == (
        f"[A]({url}/blob/HEAD/docs/A.md) ![shot]({url}/raw/HEAD/docs/a.png) [web](https://x.example) [here](#use-it)"
    )
    assert hook.with_absolute_links(text, "") == "A  [web](https://x.example) [here](#use-it)"
    readme = hook.with_absolute_links((ROOT / "README.md").read_text(), url)
    assert f"{url}/raw/HEAD/docs/images/playground.png" in readme and "](docs/" not in readme


def test_the_package_is_called_as_documented() -> None:
    assert PROJECT["project"]["name"] == "quire-llm" and PROJECT["project"]["scripts"] == {
        "quire": "quire.cli.main:main"
    }
    assert (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text().count(
        f'"{quire.__version__}"'
    ) == 1
    assert (ROOT / "src" / "quire" / "py.typed").exists()
    extras = PROJECT["project"]["optional-dependencies"]
    tracked = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {
        name for file in tracked for name in re.findall(r"pip install '?quire(\S*?)['`\s]", file.read_text())
    }
    assert named and all(
        name == "-llm" or re.fullmatch(r"-llm\[(\w+)\]", name)[1] in extras for name in named
    ), named


def test_the_source_package_has_what_the_readme_uses() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / name).exists() for name in included)
    used = re.findall(r"(?:\]\(|python |`)([\w.]+(?:/[\w.-]+)*)", (ROOT / "README.md").read_text())
    ours = {path.split("/")[0] for path in used if (ROOT / path).exists() and "/" in path}
    assert {"docs", "benchmarks", "tools", "tests"} <= ours <= set(included), ours - set(included)


def test_files_of_readme_commands_are_ignored() -> None:
    readme = (ROOT / "README.md").read_text()
    written = re.findall(r"(?:> |--plot )(\w+\.\w+)", readme)
    assert {"answers.jsonl", "load.svg", "sweep.png", "users.png"} <= set(written)
    for name in written:
        done = subprocess.run(["git", "check-ignore", "-q", "--no-index", name], cwd=ROOT)
        assert done.returncode in (0, 128), f"{name} is not ignored"  # 128: not a git checkout


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_follow_their_schema_and_pass_no_input_to_a_shell(file: Path) -> None:
    program = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent)) or shutil.which(
        "check-jsonschema"
    )
    if program is None:
        pytest.skip("check-jsonschema is not installed")
    command = [program, "--builtin-schema", "vendor.github-workflows", str(file)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    jobs: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 60
        assert not [step for step in job["steps"] if "${{" in step.get("run", "")], "use env instead"


def test_workflows_run_the_supported_versions() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["test"]["strategy"][
        "matrix"
    ]
    stated = {c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert set(matrix["python"]) == stated


def test_the_unit_starts_a_server() -> None:
    unit = (ROOT / "deploy" / "quire.service").read_text()
    program, command, *words = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])
    assert (program, command) == ("/opt/quire/bin/quire", "serve")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words)
    assert (args.model_name, args.port) == ("${QUIRE_MODEL}", 8000) and "Environment=QUIRE_MODEL=demo" in unit
    stop_s = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert stop_s > 30, "longer than --shutdown-timeout"


def test_alert_rules_are_about_metrics_that_exist() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    source = "".join(file.read_text() for file in (ROOT / "src/quire/serve/observe").glob("*.py"))
    for rule in group["rules"]:
        for name in re.findall(r"(?:vllm|quire):(\w+)", rule["expr"]):
            assert re.sub("(_seconds)?_(total|bucket)$", "", name) in source, name
        assert set(rule["annotations"]) == {"summary", "description"}
    job = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    assert job["rule_files"] == ["alerts.yml"] and job["scrape_configs"][0]["job_name"] == "quire"


def test_promtool_accepts_the_alert_rules() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        [program, "check", "rules", "deploy/alerts.yml"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
