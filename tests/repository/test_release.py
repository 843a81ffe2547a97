"""What goes out with a release agrees with the package: citation, image, issue forms."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version

import pytest
import yaml
from packaging.requirements import Requirement

from rayfed import __version__
from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
FORMS = [form for form in sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if form.stem != "config"]


def test_the_citation_is_of_the_newest_release() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    [newest, *_] = re.findall(r"^## \[([\d.]+)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == newest
    assert __version__ == PROJECT["project"]["version"]
    assert __version__ == newest or __version__.endswith(".dev0")
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_image_is_made_of_all_that_the_wheel_takes() -> None:
    copied = set(re.findall(r"^COPY (\S+) /src/\1$", DOCKERFILE, re.MULTILINE))
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied == {*wheel["packages"], *wheel["force-include"]}
    [first] = re.findall(r"^COPY (.+) /src/$", DOCKERFILE, re.MULTILINE)
    project = PROJECT["project"]
    assert set(first.split()) == {"pyproject.toml", project["readme"], *project["license-files"]}
    [python] = re.findall(r"^ARG PYTHON=(.+)$", DOCKERFILE, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    for package in ("torch", "torchvision"):
        [bound] = [one for one in project["dependencies"] if re.match(rf"{package}\W", one)]
        assert f'"{bound}"' in DOCKERFILE


def test_ray_is_within_its_bounds_and_the_page_states_the_lower_one() -> None:
    [ray] = [one for one in map(Requirement, PROJECT["project"]["dependencies"]) if one.name == "ray"]
    assert ray.specifier.contains(version("ray"))
    bounds = {bound.operator: bound.version for bound in ray.specifier}
    assert bounds.keys() == {">=", "<"}
    [*_, newest] = re.findall(r"^\| (2\.\d+) \|", (REPOSITORY / "docs" / "install.md").read_text(), re.MULTILINE)
    assert newest == bounds[">="]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_are_as_github_reads_them(form: object) -> None:
    told = yaml.safe_load(form.read_text())  # type: ignore[attr-defined]
    assert {"name", "description", "body"} <= told.keys() <= {"name", "description", "body", "labels", "title"}
    asked = [part for part in told["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in asked}) == len(asked) > 0
    for part in told["body"]:
        assert part["type"] in ("markdown", "input", "textarea", "checkboxes", "dropdown")
        assert "value" in part["attributes"] if part["type"] == "markdown" else part["attributes"]["label"]


def test_there_are_three_forms() -> None:
    assert [form.stem for form in FORMS] == ["bug", "component", "falls"]
