"""Names of arms and attacks decide nothing: verdicts, gates and recommendations are the same under any names."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rayfed.evidence.bounds import Bound
from rayfed.evidence.gate import check_bounds
from rayfed.evidence.outcomes import with_references
from rayfed.evidence.recommend import parse_bound, recommend_setting
from rayfed.evidence.settings import group_settings as grouped
from rayfed.evidence.verdicts import collect_evidence
from tests.helpers.result_fixtures import attacked

ARMS: dict[str, Any] = {
    "bare": [],
    "noise": [{"name": "gaussian", "sigma": 0.1}],
    "prune": [{"name": "prune", "ratio": 0.9}],
}
ATTACKS = ("search", "closed")
AWKWARD = [
    "dp", "dp vs strong", "dp vs strong vs x", "a, adaptive", "x batch 4", "x batch 4, adaptive", "none", "labels",
    "given public", "leaks", "not measured", " ", "\u200b", "Rauschen ä", "雑音", "a;b", "a: b", ", ", "† ¶", "vs",
]  # fmt: skip
NAMES = st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1, max_size=12))
BOUNDS = [Bound("psnr", 15.0), Bound("label_accuracy", 0.6)]


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of two attacks with and without the code on two samples of each arm."""
    rows = []
    base = draw(st.sampled_from([9.0, 30.0]))
    for arm in ARMS:
        psnr = base if arm == "bare" else draw(st.sampled_from([8.0, 30.0, 120.0, None]))
        for attack in ATTACKS:
            knowledge = draw(st.sampled_from([[], ["defence", "code"], ["defence", "code", "labels"]]))
            more = {"knowledge": knowledge, "fit": draw(st.sampled_from([None, 0.0, 0.5]))}
            more |= {
                "above_baseline": None if psnr is None else psnr - 12.0,
                "identified": 1.0,
                "distortion": 0.0,
                "message": "",
            }
            for victim in range(2):
                status = "not played" if psnr is None else draw(st.sampled_from(["ok", "ok", "diverged"]))
                rows.append(attacked(arm, attack, victim=victim, psnr=psnr, status=status, true_label=victim, **more))
    return rows


def results(
    names: dict[str, str], titles: dict[str, str], rows: list[dict[str, Any]], family: str | None = None
) -> list[Any]:
    """Verdicts, gate results and the recommended arm, with the original names."""
    arms = {names[arm]: spec for arm, spec in ARMS.items()}
    attacks = [
        {"name": "inverting_gradients", "label": titles["search"]},
        {"name": "analytic", "label": titles["closed"]},
    ]
    scenario = {"arms": arms, "attacks": attacks, "metrics": {"names": ["psnr", "label_accuracy"]}}
    renamed = [row | {"arm": names[row["arm"]], "attack": titles[row["attack"]], "family": family} for row in rows]
    back = {name: arm for arm, name in names.items()}
    found = collect_evidence(scenario, renamed, []).verdicts
    states = [(back[one.arm], one.state, sorted(one.reasons)) for one in found]
    checks = check_bounds(collect_evidence(scenario, renamed, []), BOUNDS, list(arms))
    gates = [(back[one.arm], one.batch, one.bound.name, one.state, one.value, one.exceeding) for one in checks]
    outcomes = [
        {"arm": names[arm], "attack": titles["search"], "result": state, "verdict": None, "test_accuracy": accuracy}
        | {"psnr": 9.0, "train_seconds": seconds, "images": 2, "batch_size": 2, "knowledge": ["code"], "explains": True}
        for (arm, state, *_), accuracy, seconds in zip(states, (0.9, 0.9, 0.8), (3.0, 2.0, 1.0), strict=True)
    ]
    chosen = recommend_setting(
        grouped(with_references(outcomes, scenario, lambda row: ()), []), [parse_bound("psnr<=12")]
    )
    return [states, gates, back[chosen.chosen.settings[0].arm], sorted(back[one.setting.arm] for one in chosen.refused)]


@settings(deadline=None, max_examples=150)
@given(
    tables(),
    st.lists(NAMES, min_size=3, max_size=3, unique=True),
    st.lists(NAMES, min_size=2, max_size=2, unique=True),
    st.one_of(st.none(), NAMES),
)
def test_renaming_arms_and_attacks_changes_nothing(
    rows: list[dict[str, Any]], arms: list[str], titles: list[str], family: str | None
) -> None:
    plain = results({arm: arm for arm in ARMS}, {attack: attack for attack in ATTACKS}, rows)
    renamed = results(dict(zip(ARMS, arms, strict=True)), dict(zip(ATTACKS, titles, strict=True)), rows, family)
    assert renamed == plain
