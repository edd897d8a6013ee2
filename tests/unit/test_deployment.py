"""The files for containers and dashboards, checked without an engine for containers: linters, schemas, parsers, and that
they agree with each other and with what they speak of."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard import DASHBOARD, expressions
from quire.cli.serve import add_arguments

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def tool(name: str) -> str:
    """A program that pip installs, beside the interpreter or on the path."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


# -------------------------------------------------------------------------------------- containers


def test_the_dockerfile_has_no_findings() -> None:
    found = subprocess.run([tool("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_files_follow_their_schema(file: str) -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", file]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name, those of the stages it starts from in front."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for name, arguments in instructions():
        if name == "FROM":
            source, _, stage = arguments.split()
            current = found[stage] = list(found.get(source, []))
        current.append((name, arguments))
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_both_targets_run_as_a_user_and_say_how_they_are(target: str) -> None:
    stage = stages()[target]
    last = dict(stage)
    assert last["USER"].isdigit() and last["USER"] != "0" and stage[-1][0] == "USER"
    assert "/health'" in last["HEALTHCHECK"] and "8000" in last["HEALTHCHECK"] and last["EXPOSE"] == "8000"
    assert any(name == "COPY" and f"--from=build-{target}" in arguments for name, arguments in stage)


def test_the_entrypoint_is_a_command_of_quire() -> None:
    last = dict(stages()["cpu"])
    program, command, *flags = json.loads(last["ENTRYPOINT"])
    assert (program, command) == ("quire", "serve")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args([*flags, *json.loads(last["CMD"])])
    assert (given.host, given.port, given.model_name) == ("0.0.0.0", 8000, "demo")


def test_what_is_copied_into_the_image_is_there_and_let_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, arguments in instructions():
        if name == "COPY" and "--from" not in arguments:
            for source in arguments.split()[:-1]:
                assert (ROOT / source).exists() and source in allowed, source


def test_compose_speaks_of_what_there_is() -> None:
    services = load("compose.yaml")["services"]
    assert set(services) == {"quire", "prometheus", "grafana"}
    targets = {
        services["quire"]["build"]["target"],
        load("compose.cuda.yaml")["services"]["quire"]["build"]["target"],
    }
    assert targets <= stages().keys()
    volumes = load("compose.yaml")["volumes"]
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert name == "quire" or re.fullmatch(r".+:v?\d+\.\d+\.\d+", service["image"]), "a version is pinned"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in volumes or (ROOT / source).exists(), source


# -------------------------------------------------------------------------- prometheus and grafana


def test_prometheus_finds_quire_and_grafana_finds_both() -> None:
    (job,) = load("deploy/prometheus.yml")["scrape_configs"]
    ((target,),) = (config["targets"] for config in job["static_configs"])
    host, port = target.split(":")
    services = load("compose.yaml")["services"]
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"] and job["metrics_path"] == "/metrics"
    (source,) = load("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = load("deploy/grafana/provisioning/dashboards/quire.yaml")["providers"]
    mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in services["grafana"]["volumes"]}
    folder = ROOT / mounts[provider["options"]["path"]]
    assert [path.name for path in folder.iterdir()] == ["quire.json"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/quire.json"


def test_expressions_are_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    assert len(expressions()) > 30
    for text in expressions():
        parser.parse(text)
    with pytest.raises(ValueError):
        parser.parse("sum(rate(x[5m])")  # it does refuse


def test_expressions_fit_the_kinds_of_metrics() -> None:
    """Counters are seen as rates, buckets as quantiles by le, gauges as they are."""
    for text in expressions():
        for name, range_ in re.findall(r"((?:vllm|quire):\w+)\{[^}]*\}(\[5m\])?", text):
            kind = name.endswith(("_total", "_bucket")) and name != "vllm:iteration_tokens_total"
            assert bool(range_) == kind, (name, text)
            assert name.endswith("_bucket") == ("sum by (le)" in text and "histogram_quantile" in text), text


def test_panels_have_places_of_their_own() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        refs = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(refs)) == len(refs)
        sources = [panel, *panel["targets"]] if panel["type"] != "row" else []
        assert all(part["datasource"]["uid"] == "${datasource}" for part in sources)
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "model"}
