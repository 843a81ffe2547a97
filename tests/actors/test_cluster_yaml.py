"""The cluster file, by Ray's own schema and checks; no cloud is asked."""

from __future__ import annotations

import json
import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.conftest import REPOSITORY

NEEDED = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
SCHEMA = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.fixture
def cluster() -> dict[str, Any]:
    return dict(yaml.safe_load((REPOSITORY / "cluster.yaml").read_text()))


def test_it_is_what_ray_takes(cluster: dict[str, Any]) -> None:
    jsonschema.validate(cluster, SCHEMA)
    filled = prepare_config(deepcopy(cluster))
    validate_config(filled)
    for kind in ("head", "worker"):  # and not what the defaults would put there, which is another Ray
        assert filled[f"{kind}_setup_commands"] == cluster["setup_commands"]


def test_the_checks_notice_mistakes(cluster: dict[str, Any]) -> None:
    cluster["available_node_types"]["cpu"]["resources"]["CPU"] = 1.5
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, SCHEMA)


def test_every_node_shows_the_token_and_the_dashboard_stays_at_home(cluster: dict[str, Any]) -> None:
    starts = [c for kind in ("head", "worker") for c in cluster[f"{kind}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "--env=RAY_AUTH_MODE=token" in cluster["docker"]["run_options"]  # `ray exec` and `ray submit` show it, too
    assert any(path.endswith(".ray/auth_token") for path in cluster["file_mounts"])
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_workers_come_and_go_by_demand(cluster: dict[str, Any]) -> None:
    kinds = cluster["available_node_types"]
    workers = {name: kind for name, kind in kinds.items() if name != cluster["head_node_type"]}
    assert all(kind["min_workers"] < kind["max_workers"] for kind in workers.values())
    assert any(kind["resources"].get("GPU") for kind in workers.values())


def test_all_examples_run_in_the_images_of_the_dockerfile(cluster: dict[str, Any]) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    built = set(re.findall(r"docker build -t (\S+)", dockerfile))
    images = {cluster["docker"]["image"].removesuffix(":latest")}
    images |= {kind["docker"]["worker_image"] for kind in cluster["available_node_types"].values() if "docker" in kind}
    assert images == built
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    assert set(re.findall(r"docker build -t (\S+)", page)) == built
    texts = [file.read_text() for file in sorted((REPOSITORY / "kubernetes").glob("*.yaml"))]
    kubernetes = {image for text in texts for image in re.findall(r"image: (\S+)", text)}
    assert {image.removesuffix(":latest") for image in kubernetes} == built


def test_the_autoscaler_can_start_the_image(cluster: dict[str, Any]) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    assert not re.search(r"^ENTRYPOINT", dockerfile, re.MULTILINE)  # it gives `bash` as the command
    [home] = re.findall(r"^ENV HOME=(.+)$", dockerfile, re.MULTILINE)  # it asks the image, not the container
    assert all(path.startswith(f"{home}/") for path in cluster["file_mounts"])
    assert "rsync" in dockerfile


def kubernetes_file(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a document for KubeRay, and the part that describes its cluster."""
    document = yaml.safe_load((REPOSITORY / "kubernetes" / name).read_text())
    return document, document["spec"].get("rayClusterSpec", document["spec"])


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_kuberay_takes_the_files(name: str) -> None:
    document, spec = kubernetes_file(name)
    schema = json.loads((REPOSITORY / "tests" / "actors" / "kuberay.json").read_text())[document["kind"]]
    jsonschema.validate(document, schema)
    assert document["apiVersion"] == "ray.io/v1"
    assert any(one.name == "ray" and one.specifier.contains(spec["rayVersion"]) for one in map(Requirement, NEEDED))
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in spec["workerGroupSpecs"]:
        assert 0 == group["minReplicas"] == group["replicas"] < group["maxReplicas"]
        assert group["labels"] == {"kind": group["groupName"]}
        [container] = group["template"]["spec"]["containers"]
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (group["groupName"] == "gpu")
    spec["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "a mistake"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


PROCESSORS = {"c5a": "AMD EPYC 7R32", "g5": "AMD EPYC 7R32", "c6i": "Intel Xeon 8375C", "m6i": "Intel Xeon 8375C"}
"""What the provider says of the families of its machines."""


def test_all_nodes_have_one_kind_of_processor(cluster: dict[str, Any]) -> None:
    types = [kind["node_config"]["InstanceType"] for kind in cluster["available_node_types"].values()]
    assert len({PROCESSORS[name.partition(".")[0]] for name in types}) == 1
