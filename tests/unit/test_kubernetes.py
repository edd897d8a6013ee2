"""The Kubernetes manifests: against Kubernetes' own schemas, and against the flags, routes and metrics of Quire."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli import rank, serve
from quire.cli.flags import given
from quire.config import EngineConfig
from quire.serve.http.app import routes
from quire.serve.settings import ServeConfig

kubernetes_validate = pytest.importorskip("kubernetes_validate")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.33"
KNOWN_KEYS = {  # of the custom resource, for which Kubernetes has no schema
    "spec": {"replicas", "startupPolicy", "leaderWorkerTemplate"},
    "leaderWorkerTemplate": {"size", "restartPolicy", "leaderTemplate", "workerTemplate"},
}


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text()) if one]


def everything() -> list[dict[str, Any]]:
    names = ("quire.yaml", "autoscaling.yaml", "leaderworkerset.yaml")
    return [one for name in names for one in documents(name)]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in everything() if one["kind"] == kind]


def pod_specs() -> list[dict[str, Any]]:
    found = [one["spec"]["template"]["spec"] for one in of_kind("Deployment")]
    for group in of_kind("LeaderWorkerSet"):
        template = group["spec"]["leaderWorkerTemplate"]
        found += [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]
    return found


def containers() -> list[dict[str, Any]]:
    return [container for spec in pod_specs() for container in spec["containers"]]


def command_lines(container: dict[str, Any]) -> list[list[str]]:
    """Return the `quire` commands that a container runs, word by word."""
    if "command" not in container:  # the image's entrypoint
        entry = re.search(r"^ENTRYPOINT (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        assert entry is not None
        return [[*yaml.safe_load(entry[1]), *container["args"]]]
    assert container["command"] == ["sh", "-c"] and len(container["args"]) == 1
    parts = [shlex.split(part) for part in container["args"][0].split("&")]
    return [part[1:] if part[0] == "exec" else part for part in parts]


def parse(words: list[str]) -> argparse.Namespace:
    assert words[0] == "quire"
    parser = argparse.ArgumentParser(exit_on_error=False)
    {"serve": serve, "rank": rank}[words[1]].add_arguments(parser)
    found, unknown = parser.parse_known_args(words[2:])
    assert not unknown, f"{unknown} are no flags of quire {words[1]}"
    return found


@pytest.mark.parametrize("document", everything(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_manifests_follow_the_schemas_of_kubernetes(document: dict[str, Any]) -> None:
    if document["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    spec = document["spec"]
    assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(spec) <= KNOWN_KEYS["spec"]
    assert set(spec["leaderWorkerTemplate"]) <= KNOWN_KEYS["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        template = spec["leaderWorkerTemplate"][role]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_a_wrong_manifest_would_be_found() -> None:
    (wrong,) = of_kind("Service")[:1]
    wrong["spec"]["ports"][0]["targetprot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_commands_have_flags_that_exist_and_settings_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_RANK_TOKEN", "secret")
    commands = [words for container in containers() for words in command_lines(container)]
    assert [words[1] for words in commands] == ["serve", "rank", "serve", "rank"]
    for words in commands:
        found = parse([word.replace("$LWS_LEADER_ADDRESS", "leader.example") for word in words])
        if words[1] == "serve":
            EngineConfig(**given(found, EngineConfig))
            ServeConfig(**given(found, ServeConfig))


def test_ports_of_servers_containers_probes_and_services_agree() -> None:
    paths = {route.path for route in routes()}
    servers = 0
    for container in containers():
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
        for words in command_lines(container):
            if words[1] == "serve":
                servers += 1
                assert given(parse(words), ServeConfig)["port"] == ports["http"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if (probe := container.get(name)) is not None:
                assert probe["httpGet"]["path"] in paths and probe["httpGet"]["port"] in ports
                assert "/health" in probe["httpGet"]["path"], "it needs no key"
    assert servers == 2
    for service in of_kind("Service"):
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    (deployment,) = of_kind("Deployment")
    notes = deployment["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/path"] in paths and notes["prometheus.io/port"] == "8000"


def test_labels_select_the_pods_they_mean() -> None:
    (deployment,) = of_kind("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    services = {one["metadata"]["name"]: one["spec"]["selector"] for one in of_kind("Service")}
    assert services["quire"].items() <= labels.items()
    (group,) = of_kind("LeaderWorkerSet")
    leader = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    worker = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
    assert (
        services["quire-large"].items() <= leader.items()
        and not services["quire-large"].items() <= worker.items()
    )
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_ranks_and_gpus_add_up() -> None:
    (group,) = of_kind("LeaderWorkerSet")
    leader, worker = pod_specs()[1:]
    commands = [words for spec in (leader, worker) for words in command_lines(spec["containers"][0])]
    parsed = [(words[1], parse(words)) for words in commands]
    joined = [found for name, found in parsed if name == "rank"]
    (server,) = (found for name, found in parsed if name == "serve")
    workers = group["spec"]["leaderWorkerTemplate"]["size"] - 1
    assert 1 + joined[0].count + workers * joined[1].count == server.tensor_parallel_size
    assert {found.address for found in joined} == {server.rank_address}
    for spec, used in ((leader, 1 + joined[0].count), (worker, joined[1].count)):
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == used
    port = server.rank_address.rpartition(":")[2]
    assert port in {str(one["containerPort"]) for one in leader["containers"][0]["ports"]}


def test_the_autoscaler_reads_metrics_that_the_adapter_makes_of_metrics_that_exist() -> None:
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    rules = documents("prometheus-adapter.yaml")[0]["rules"]["custom"]
    made = {rule["name"]["as"] for rule in rules}
    assert {one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"]} == made
    sources = (ROOT / "src" / "quire" / "serve" / "observe").glob("*metrics.py")
    exported = "".join(path.read_text() for path in sources)
    names = {name for rule in rules for name in re.findall(r"(?:vllm|quire):\w+", str(rule))}
    assert len(names) == 3
    for name in names:
        assert f'"{name}"' in exported, f"{name} is no metric of Quire"


def test_requests_may_end_before_a_pod_is_killed() -> None:
    (deployment,) = of_kind("Deployment")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    settings = ServeConfig(**given(parse(command_lines(container)[0]), ServeConfig))
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > before + settings.shutdown_timeout


def test_secrets_and_volumes_that_are_used_exist() -> None:
    for spec in pod_specs():
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    claims = {one["metadata"]["name"] for one in of_kind("PersistentVolumeClaim")}
    for spec in pod_specs():
        for volume in spec["volumes"]:
            assert volume.get("persistentVolumeClaim", {"claimName": "quire-cache"})["claimName"] in claims
    text = "".join((FOLDER / name).read_text() for name in ("quire.yaml", "leaderworkerset.yaml"))
    created = set(re.findall(r"kubectl create secret generic (\S+)", text))
    used = {
        entry["valueFrom"]["secretKeyRef"]["name"]
        for container in containers()
        for entry in container.get("env", [])
    }
    assert used == created
