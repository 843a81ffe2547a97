"""YAML as scenarios and options have it: the numbers of YAML 1.2, and text that stays text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed import scenario
from rayfed.core.documents import dump_yaml, load_yaml, read_yaml, yaml_flow

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x85"))
"""PyYAML takes the old control character for the end of a line as it reads, and not as it writes."""
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT


@pytest.mark.parametrize("text", ["1e-5", "1E5", "-2e3", "+1.e3", ".5e3", "1.0e-5", "12e03"])
def test_a_number_with_an_exponent_is_one(text: str) -> None:
    assert load_yaml(text) == read_yaml(text)[0] == float(text)


@pytest.mark.parametrize("text", ["1e", "e5", "1e5a", "1e-", "e", "."])
def test_what_only_looks_like_one_is_text(text: str) -> None:
    assert load_yaml(text) == text


def test_a_parameter_of_an_own_component_is_a_number() -> None:
    changed = scenario.with_changes({"model": {"name": "own:Model"}}, ["model.slope=1e-5", "model.tag='1e-5'"])
    assert changed["model"] == {"name": "own:Model", "slope": 1e-5, "tag": "1e-5"}


@given(st.sampled_from(["1e-5", "1E5", "yes", "~", "2e3"]) | _SCALARS)
def test_data_come_back_as_they_were(value: Any) -> None:
    for whole in (value, [value], {"key": {"inner": [value, value]}}):
        assert load_yaml(dump_yaml(whole)) == load_yaml(yaml_flow(whole)) == whole
