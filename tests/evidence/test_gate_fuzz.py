"""A gate passes only what was measured: random models, defences, attacks, faults and names, judged by another rule."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rayfed import registry
from rayfed.cli import app
from rayfed.store.folder import RunFolder
from tests.conftest import REPOSITORY
from tests.helpers.faulty import ERRORS, EXITS

LIMIT = 15.0
EXAMPLES = int(os.environ.get("RAYFED_GATE_EXAMPLES", "50"))
"""More of them than usual: RAYFED_GATE_EXAMPLES=2000 pytest tests/evidence/test_gate_fuzz.py."""
NAMES = (
    "none", "dp", "dp vs strong", "none vs dp", " vs ", "analytic", "analytic batch 1, informed", "a batch 4", "labels",
    "code", "defence,code", "x, informed", "blind", "PASSED", "null", "1", "yes", "a.b", "a/b", "../up", "[red]x", "é",
    "none (no defence)", "prune (ratio 0.9) + gaussian", "gate: PASSED", "-", "*", "leaks",
)  # fmt: skip
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking, which would play a thousand runs."""
names = st.sampled_from(NAMES) | st.text(min_size=1, max_size=12)
faults = st.sampled_from((*EXITS, *ERRORS))
DEFENCES: st.SearchStrategy[list[dict[str, Any]]] = st.one_of(
    st.just([]),
    st.builds(lambda sigma: [{"name": "gaussian", "sigma": sigma}], st.sampled_from([1e-6, 0.1, 10.0])),
    st.builds(lambda ratio: [{"name": "prune", "ratio": ratio}], st.sampled_from([0.1, 0.9])),
    st.builds(
        lambda stage, fault: [{"name": "tests.helpers.faulty:Shaky", "stage": stage, "fault": fault}],
        st.sampled_from(["", "", "check", "wrap", "update"]), faults,
    ),
    st.builds(lambda noise: [{"name": "tests.helpers.faulty:Shaky", "noise": noise}], st.sampled_from([0.0, 0.5])),
)  # fmt: skip
STRONG = [{"name": "gaussian", "sigma": 10.0}]
INFORMED = {"name": "analytic", "knowledge": ["defence", "code"]}
ATTACKS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"name": "analytic"}),
    st.just(INFORMED),
    st.just({"name": "analytic", "knowledge": ["labels"]}),
    st.just({"name": "entries"}),
    st.builds(
        lambda images: {"name": "tests.helpers.faulty:Guess", "images": images},
        st.sampled_from(["grey", "nan", "infinite", "fewer", "other shape", "none"]),
    ),
    st.builds(lambda fault: {"name": "tests.helpers.faulty:Guess", "fault": fault}, faults),
)
MODELS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda hidden: {"name": "tests.helpers.faulty:Net", "hidden": hidden}, st.sampled_from([0, 8])),
    st.builds(
        lambda stage, fault: {"name": "tests.helpers.faulty:Net", "stage": stage, "fault": fault},
        st.sampled_from(["init", "forward", "training", "late", "single", "double", "gradient"]), faults,
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def faulty_code_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in `tests/helpers/faulty.py` are the user's, as those of a file beside a scenario."""
    monkeypatch.setattr(registry, "SEARCHED", [*registry.SEARCHED, str(REPOSITORY)])


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """A scenario with arms and attacks of any names; half of them pass a gate but for at most one fault."""
    sound, fault = draw(st.booleans()), draw(st.sampled_from(["", "model", "arm", "attack"]))
    labels = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    kinds = [draw(ATTACKS) for _ in labels]
    if sound:
        own = draw(st.lists(names, min_size=2, max_size=3, unique=True))
        pipelines = [[], STRONG, draw(DEFENCES) if fault == "arm" else STRONG]
        arms = dict(zip(own, pipelines, strict=False))
        kinds = [INFORMED] + [draw(ATTACKS) if fault == "attack" else INFORMED for _ in labels[1:]]
    else:
        arms = draw(st.dictionaries(names, DEFENCES, min_size=1, max_size=3))
    attacks = [
        {**kind, "label": label, "observes": "gradient", "batch_size": 1 if sound else draw(st.sampled_from([1, 2]))}
        for label, kind in zip(labels, kinds, strict=True)
    ]
    model = {"name": "tests.helpers.faulty:Net"} if sound and fault != "model" else draw(MODELS)
    return {
        "name": "fuzz",
        "seed": draw(st.integers(0, 3)),
        "data": {"name": "digits", "size": 4, "train_samples": 12, "test_samples": 4},
        "model": model,
        "training": {"batch_size": 2, "steps": 1},
        "federation": {"rounds": 1, "clients": 2},
        "metrics": {"names": ["psnr", "label_accuracy"]},
        "arms": arms,
        "attacks": attacks,
    }


@given(scenarios(), st.booleans(), st.sampled_from(["launch", "attack"]))
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=PHASES)
def test_a_gate_passes_only_what_was_measured(document: dict[str, Any], allowed: bool, command: str) -> None:
    with TemporaryDirectory() as place:
        file = Path(place, "s.yaml")
        file.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
        done = CliRunner().invoke(app, [command, str(file), "--executor", "local", "--quiet", "--out", place])
        folders = [path.parent for path in Path(place).glob("fuzz-*/status.json")]
        event(f"{command}: exit code {done.exit_code}")
        assert done.exit_code in (0, 2), done.output
        if done.exit_code == 0:
            assert _state(folders[0]) == "finished"
        if not folders:
            assert done.exit_code == 2, done.output
            return
        more = ["--allow-unmeasured"] if allowed else []
        gate = CliRunner().invoke(app, ["gate", str(folders[0]), "--fail-above", str(LIMIT), *more])
        event(f"gate: exit code {gate.exit_code}{', unmeasured allowed' if allowed else ''}")
        rows = RunFolder.open(str(folders[0])).read_table("attacks").to_pylist()
        assert gate.exit_code in ((0, 2, 3) if allowed else _expected(document, rows)), gate.output
        if gate.exit_code == 0:
            assert not any(_leaks(row) for row in rows if document["arms"].get(row["arm"]))


def _expected(document: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[int, ...]:
    """Exit codes that the gate may have: 0 if something leaks undefended and all defended arms have results."""
    defended = [arm for arm, defences in document["arms"].items() if defences]
    shown = any(_leaks(row) for row in rows if not document["arms"].get(row["arm"]))
    measured = all(any(_finite(row) for row in rows if row["arm"] == arm) for arm in defended)
    held = not any(_leaks(row) for row in rows if row["arm"] in defended)
    return (0, 2, 3) if defended and shown and measured and held else (2, 3)


def _finite(row: dict[str, Any]) -> bool:
    return row["status"] in ("ok", "diverged") and row["psnr"] is not None and row["psnr"] == row["psnr"]


def _leaks(row: dict[str, Any]) -> bool:
    near = _finite(row) and row["psnr"] >= LIMIT and (row["above_baseline"] or 0.0) > 0
    return near and row["identified"] == 1


def _state(folder: Path) -> str:
    state: str = yaml.safe_load((folder / "status.json").read_text())["state"]
    return state


@pytest.mark.slow
@given(MODELS, DEFENCES, st.booleans())
@settings(max_examples=max(EXAMPLES // 10, 10), suppress_health_check=list(HealthCheck), phases=PHASES)
def test_an_audit_passes_only_what_was_measured(
    model: dict[str, Any], defences: list[dict[str, Any]], allowed: bool
) -> None:
    with TemporaryDirectory() as place:
        sets = [f"model.{key}={value}" for key, value in model.items() if key != "name"]
        wanted = ["--defence", yaml.safe_dump(defences, default_flow_style=True)] if defences else []
        more = ["--allow-unmeasured"] if allowed else []
        done = CliRunner().invoke(
            app,
            ["audit", "--model", model["name"], "--data", "digits", "--size", "4", "--batch", "1", "--images", "1",
             "--iterations", "1", "--fail-above", str(LIMIT), "--executor", "local", "--quiet", "--out", place,
             *wanted, *more, *(part for one in sets for part in ("--set", one))],
        )  # fmt: skip
        event(f"exit code {done.exit_code}{', unmeasured allowed' if allowed else ''}")
        folders = [path.parent for path in Path(place).glob("*/status.json")]
        if done.exit_code == 0:
            assert folders or allowed
            rows = [row for one in folders for row in RunFolder.open(str(one)).read_table("attacks").to_pylist()]
            arms = {row["arm"] for row in rows}
            assert allowed or any(_leaks(row) for row in rows if row["arm"] == "none")
            assert allowed or all(any(_finite(row) for row in rows if row["arm"] == arm) for arm in arms)
            assert not any(_leaks(row) for row in rows if row["arm"] != "none" or not defences)
