"""What the privacy account claims: sensitivities of every stack, deltas that mean something, bounds that bound."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from rayfed import gradients, registry
from rayfed.defences import dp_fedavg, dp_sgd, noise
from rayfed.defences.base import Batch, Defence
from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.noise import LocalNoise
from rayfed.errors import UserError
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.guarantee_compat import mixed_guarantees
from rayfed.evidence.pareto import compute_front
from rayfed.evidence.recommend import parse_bound, recommend_setting
from rayfed.evidence.settings import group_settings
from rayfed.gradients import weights_of
from rayfed.models.private import without
from rayfed.privacy.accountant import Method, Release, compute_guarantee
from rayfed.privacy.printing import format_lower, format_upper
from rayfed.privacy.spending import ClientWork, PrivacySetting, Spending
from rayfed.report.export.tables import export_table
from rayfed.report.html.explorer import explore
from rayfed.report.terminal.run import RunView
from rayfed.report.text import recommendation
from rayfed.report.text.figures import measure_value_text
from rayfed.report.text.formats import format_measure
from rayfed.report.text.guarantees import guarantee_lines, guarantee_sentences
from rayfed.report.text.sweeps import sweep_summary
from rayfed.report.text.tables import grid
from rayfed.scenario import DataSpec, parse
from rayfed.simulation.client.local import update_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.inputs import Inputs, prepare_inputs
from rayfed.store.schemas import TABLES
from rayfed.update import Named, Update
from tests.conftest import REPOSITORY
from tests.helpers.component_fixtures import variants
from tests.helpers.result_fixtures import outcome

CPU = torch.device("cpu")

# Sensitivity: what one unit of privacy can move, against what the accountant was told

TINY = """
name: t
data: {name: digits, size: 8, train_samples: 24, test_samples: 10, public: 0.4}
model: {name: lenet, norm: group}
training: {steps: 2, batch_size: 4, lr: 0.5}
federation: {rounds: 2, clients: 2}
privacy: {accountant: rdp}
"""
MECHANISMS: dict[str, dict[str, Any]] = {
    "dp_sgd": {"clip": 0.5, "noise_multiplier": 1},
    "fed_cdp": {"clip": 0.2, "noise_multiplier": 1},
    "gaussian": {"clip": 0.5, "sigma": 0.1},
    "laplace": {"clip": 0.5, "scale": 0.1, "delta": 1e-5},
    "dp_fedavg": {"clip": 0.5, "noise_multiplier": 1},
}
MOST = 1 + 1e-5
"""Of rounding in float32."""


class Tape:
    """What a mechanism released, before its noise, on one data set; played back, how far the neighbour is from it.

    Both data sets have the same released values behind them at every step, as composition is about: what differs is
    then the data's doing alone. The noise is the same in both, so all that follows from releases has to be equal.
    """

    def __init__(self, order: float) -> None:
        self.order, self.played = order, 0
        self.values: list[Named] = []
        self.moved: list[float] = []
        self.back = False

    def release(self, value: Named) -> Named:
        """The value, or that of the first data set in its place."""
        if not self.back:
            self.values.append(value)
            return value
        first, self.played = self.values[self.played], self.played + 1
        apart = torch.cat([(value[name] - t).flatten() for name, t in first.items()])
        self.moved.append(float(torch.linalg.vector_norm(apart.double(), ord=self.order)))
        return first


def stacks(mechanism: str) -> Iterator[list[dict[str, Any]]]:
    """The mechanism with every registered defence, before and behind it."""
    accounted = {"name": mechanism, **MECHANISMS[mechanism]}
    yield [accounted]
    for name in registry.table("defences"):
        for parameters in variants(name):
            registry.build("defences", name, parameters)  # `claiming` would skip a defence with wrong parameters
            other = {"name": name, **parameters}
            yield from ([accounted, other], [other, accounted])


@pytest.fixture(scope="module")
def tiny() -> Any:
    return parse(TINY).data.load()


def claiming(stack: list[dict[str, Any]], mechanism: str) -> tuple[Inputs, Defence, Spending] | None:
    """A run of that stack, its mechanism and what it spends; None where the pair is refused or nothing is claimed."""
    try:
        found = prepare_inputs(parse(TINY, changes=[f"arms={{a: {stack}}}"]))
    except UserError:
        return None
    account = found.accounts[0]
    places = [i for i, each in enumerate(stack) if each == {"name": mechanism, **MECHANISMS[mechanism]}]
    claimed = {(row["defence"], row["mechanism"]) for row in found.privacy if row.get("epsilon") is not None}
    defence = account.arm.defences[places[0]]
    spent = defence.spends(account.setting(2))
    assert spent is not None
    return (found, defence, spent) if (mechanism, spent.mechanism) in claimed else None


def measured(
    found: Inputs, defence: Defence, spent: Spending, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, bool, int]:
    """The largest change of what is released over the sensitivity that is accounted, whether the updates that are sent
    differ although the releases are the same, and how many releases there were; of client 0, in two rounds.
    """
    tape = Tape(getattr(defence, "order", 2))
    with monkeypatch.context() as patched:
        _record(defence, tape, patched)
        sent = [_rounds(found, tape, spent.unit, back) for back in (False, True)]
    deviation = defence.width if isinstance(defence, LocalNoise) else defence.deviation  # type: ignore[attr-defined]
    if isinstance(defence, DpSgd):
        deviation = defence.noise(SimpleNamespace(round=0))  # type: ignore[arg-type]
    sensitivity = deviation / spent.releases[0].multiplier
    apart = [
        not torch.equal(t, second.tensors[name])
        for first, second in zip(*sent, strict=True)
        for name, t in first.tensors.items()
    ]
    apart += [first.samples != second.samples for first, second in zip(*sent, strict=True)]
    moved = tape.moved
    if isinstance(defence, dp_fedavg.DpFedAvg):  # the neighbour sends nothing at all
        moved = [float(gradients.norm(value)) for value in tape.values]
    return max(moved) / sensitivity, any(apart), len(tape.values)


def _record(defence: Defence, tape: Tape, patched: pytest.MonkeyPatch) -> None:
    """Have the mechanism hand what it has clipped to the tape."""
    if isinstance(defence, DpSgd):
        inner = type(defence).clipped_sum

        def clipped_sum(self: DpSgd, each: Named, task: Any) -> Named:
            made = inner(self, each, task)
            return tape.release(made) if self == defence else made

        patched.setattr(type(defence), "clipped_sum", clipped_sum)
        patched.setattr(dp_sgd, "_each", _without_marked)
        return

    def clipped(tensors: Named, bound: float, order: float) -> Named:
        made = _CLIPPED(tensors, bound, order)
        return tape.release(made) if (bound, order) == (defence.clip, tape.order) else made  # type: ignore[attr-defined]

    patched.setattr(noise, "clipped", clipped)
    patched.setattr(dp_fedavg, "clipped", clipped)


_CLIPPED, _EACH = noise.clipped, dp_sgd._each


def _without_marked(next: Any, task: Any, weights: Named, batch: Batch) -> tuple[Named, torch.Tensor]:
    """Per-sample gradients, those of samples without a label set to zero."""
    each, loss = _EACH(next, task, weights, batch)
    there = batch.labels.sum(1) > 0
    return {name: g * there.view(-1, *[1] * (g.ndim - 1)) for name, g in each.items()}, loss


def _rounds(found: Inputs, tape: Tape, unit: str, back: bool) -> list[Update]:
    """What client 0 sends in two rounds, of its data (`back` false) or of neighbouring ones."""
    tape.back = back
    runtime = ClientRuntime(found.scenario, found.data, found.parts, CPU)
    own = runtime.own_data

    def given(arm: str, client: int, rows: np.ndarray) -> Batch:
        batch = own(arm, client, rows)
        if unit == "client":
            return batch._replace(inputs=1 - batch.inputs, labels=batch.labels.roll(1)) if back else batch
        # A sample without a label has no loss: whatever trains on it directly learns nothing of it.
        labels = torch.nn.functional.one_hot(batch.labels, 10).float()
        labels[0] *= not back
        return batch._replace(labels=labels)

    runtime.own_data = given  # type: ignore[method-assign]
    arm, state, sent = runtime.arm("a"), {}, []  # type: ignore[var-annotated]
    weights = without(weights_of(arm.model), arm.private)
    for round in range(2):
        task = runtime.task("a", Sent(round, weights, arm.buffers), 0, found.parts[0], state)
        sent.append(update_method(arm.spec.training, arm.defences)(task))
        state = task.state
    return sent


@pytest.mark.parametrize(
    "mechanism",
    [pytest.param(n, marks=[] if n in ("dp_sgd", "dp_fedavg") else pytest.mark.engine) for n in MECHANISMS],
)
def test_no_defence_beside_a_mechanism_moves_more_than_is_accounted(
    mechanism: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every registered defence, one written tomorrow too: where an epsilon is printed, it holds for the pair."""
    monkeypatch.setattr(DataSpec, "load", lambda _: tiny)
    broken, held = [], 0
    for stack in stacks(mechanism):
        if claim := claiming(stack, mechanism):
            ratio, apart, releases = measured(*claim, monkeypatch)
            assert releases
            held += 1
            names = [each["name"] for each in stack]
            if ratio > MOST:
                broken.append(f"{names}: {ratio:.2f} times the sensitivity")
            if apart:
                broken.append(f"{names}: what is sent differs beside the release")
    assert held > 5
    assert not broken, "\n".join(broken)


def test_private_layers_trained_on_raw_data_leave_no_epsilon() -> None:
    for private in ("split", "passport"):
        for mechanism in ("dp_sgd", "fed_cdp"):
            noised = {"name": mechanism, **MECHANISMS[mechanism]}
            for stack in ([{"name": private}, noised], [noised, {"name": private}]):
                [row] = prepare_inputs(parse(TINY, changes=[f"arms={{a: {stack}}}"])).privacy
                assert "epsilon" not in row
                assert f"private layers of {private}" in row["note"]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_no_more_than_the_bound(broken: float) -> None:
    """One sample must not be able to make a sum infinite, or a client fail: that would be seen."""
    each = {"w": torch.tensor([[0.1, 0.2], [broken, 1.0], [3.0, 4.0]])}
    rest = {"w": each["w"][[0, 2]]}
    for name in ("dp_sgd", "fed_cdp"):
        defence = registry.find("defences", name)(clip=1.0, noise_multiplier=1.0)
        work: Any = SimpleNamespace(round=0)
        apart = defence.clipped_sum(each, work)["w"] - defence.clipped_sum(rest, work)["w"]
        assert float(apart.norm()) <= 1
    for order in (1, 2):
        assert float(noise.clipped({"w": each["w"][1], "b": torch.ones(2)}, 1.0, order)["w"].norm(order)) <= MOST


@pytest.mark.parametrize("value", [0.3, 0.7])
def test_a_norm_keeps_to_its_bound_however_many_values_are_added(value: float) -> None:
    """A million values of one size, as 1-bit quantisation sends: a sum in single precision loses a hundredth."""
    update = {"w": torch.full((10**6,), value)}
    for order in (1, 2):
        clipped = noise.clipped(update, 1.0, order)["w"].double()
        assert float(torch.linalg.vector_norm(clipped, ord=order)) <= 1 + 1e-6
    for name in ("dp_sgd", "fed_cdp"):
        defence = registry.find("defences", name)(clip=1.0, noise_multiplier=1.0)
        [total] = defence.clipped_sum({"w": update["w"][None]}, SimpleNamespace(round=0)).values()
        assert float(total.double().norm()) <= 1 + 1e-6


@pytest.mark.parametrize(("value", "bound"), [(1e-24, 1e-30), (1e-20, 1e-22), (3e38, 1.0), (3e38, 1e-3), (1e25, 1.0)])
def test_a_bound_holds_where_squares_leave_single_precision(value: float, bound: float) -> None:
    """Far below it or far above."""
    update = {"w": torch.full((1000,), value)}
    for order in (1, 2):
        clipped = noise.clipped(update, bound, order)["w"].double()
        assert float(torch.linalg.vector_norm(clipped, ord=order)) <= bound * (1 + 1e-6)
    for name in ("dp_sgd", "fed_cdp"):
        defence = registry.find("defences", name)(clip=bound, noise_multiplier=1.0)
        [total] = defence.clipped_sum({"w": update["w"][None]}, SimpleNamespace(round=0)).values()
        assert float(total.double().norm()) <= bound * (1 + 1e-6)


# Delta: the probability with which the promise may be void

RUN = """
name: t
data: {name: digits, size: 8, train_samples: 200, test_samples: 50}
model: {name: mlp, hidden: [4]}
training: {batch_size: 10, lr: 0.1}
federation: {rounds: 1, clients: 20}
privacy: {accountant: rdp}
"""


def noted(name: str, **parameters: float) -> Any:
    stack = [{"name": name, **{"noise_multiplier": 2.0} | parameters}]
    return prepare_inputs(parse(RUN, changes=[f"arms={{a: {stack}}}"])).privacy


@pytest.mark.parametrize(
    ("name", "quiet", "loud", "units"),
    [("dp_sgd", 0.0049, 0.005, "1/200"), ("dp_fedavg", 0.049, 0.05, "1/20")],
)
def test_a_delta_of_one_over_the_units_is_noted(name: str, quiet: float, loud: float, units: str) -> None:
    [row] = noted(name, delta=quiet)
    assert row.get("note") is None
    [row] = noted(name, delta=loud)
    assert row["epsilon"] > 0
    assert units in row["note"]
    assert any(units in line for line in guarantee_lines([row]))
    assert any(units in line for line in guarantee_sentences([row | {"arm": "a"}]))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_delta_from_a_tenth_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"delta"):
        parse(RUN, changes=[f"arms={{a: [{ {'name': name, **MECHANISMS[name], 'delta': 0.1} }]}}"])
    parse(RUN, changes=[f"arms={{a: [{ {'name': name, **MECHANISMS[name], 'delta': 0.0999} }]}}"])


PROMISE: dict[str, Any] = {
    "epsilon": 2.0,
    "delta": 1e-5,
    "epsilon_unit": "sample",
    "epsilon_adjacency": "each single sample (zero-out adjacency)",
}


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 1e-3},
        {"delta": 0.999999e-5},
        {"epsilon_unit": "client"},
        {"epsilon_adjacency": "one sample replaced"},
        {"epsilon_against": "not the server"},
    ],
)
def test_epsilons_of_different_guarantees_are_not_compared(change: dict[str, Any]) -> None:
    rows = [outcome("a", psnr=9.0, test_accuracy=0.9, **PROMISE)]
    alike = group_settings([*rows, outcome("b", psnr=9.0, test_accuracy=0.8, **PROMISE | {"epsilon": 1.0})])
    mixed = group_settings([*rows, outcome("b", psnr=9.0, test_accuracy=0.8, **PROMISE | {"epsilon": 1.0} | change)])
    asked = [parse_bound("epsilon<=1.5")]
    assert recommend_setting(alike, asked).chosen.title == "b"
    with pytest.raises(UserError, match=r"of different kinds.*a: .*b: "):
        recommend_setting(mixed, asked)
    assert len(compute_front(alike, "epsilon", "test_accuracy").best) == 2
    with pytest.raises(UserError, match=r"of different kinds"):
        compute_front(mixed, "epsilon", "test_accuracy")
    assert compute_front(mixed, "psnr", "test_accuracy").best
    assert [len(mixed_guarantees(each, "epsilon")) for each in (alike, mixed)] == [0, 2]
    assert "epsilon" in explore(alike).leakages
    assert "epsilon" not in explore(mixed).leakages


# Figures: an upper bound stays one when it is written down

NUMBERS = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-−+]?\d+)?")
BOUNDS = st.floats(1e-6, 1e6) | st.floats(0.01, 100) | st.integers(1, 9999).map(lambda n: n + 1 / 3)


def read(text: str, after: str = "") -> float:
    """The first number behind some words."""
    found = NUMBERS.search(text[text.index(after) + len(after) :])
    assert found, text
    return float(found[0].replace("−", "-"))


def row(epsilon: float, delta: float = 1e-5) -> dict[str, Any]:
    stated = {"arm": "arm", "defence": "dp_sgd", "epsilon": epsilon, "delta": delta, "rounds": 1, "note": None}
    return stated | {"unit": "sample", "adjacency": "x", "against": "y", "mechanism": "z", "accountant": "pld"}


def in_table(format: str, epsilon: float, delta: float) -> str:
    table = pa.Table.from_pylist([row(epsilon, delta) | {"conversion": "c"}], schema=TABLES["privacy"])
    scenario = {"name": "t", "federation": {"clients": 2, "rounds": 1}}
    return export_table(SimpleNamespace(table=lambda _: table, scenario=scenario), format, "privacy")  # type: ignore[arg-type]


def advised(epsilon: float, delta: float) -> str:
    rows = group_settings([outcome("a", psnr=9.0, **PROMISE | {"epsilon": epsilon, "delta": delta})])
    return " ".join(recommendation.remarks(recommend_setting(rows, [parse_bound("psnr<=10")])))


def swept(epsilon: float, delta: float) -> str:
    rows = group_settings([outcome("a", psnr=9.0, **PROMISE | {"epsilon": epsilon, "delta": delta})])
    return " ".join(sweep_summary(rows, None, Criterion.from_modality("pixels", None), {}, ["a"])[-1].lines)


def in_grid(epsilon: float, repeats: int) -> str:
    rows = [outcome("a", psnr=9.0, seed=seed, **PROMISE | {"epsilon": epsilon / 2**seed}) for seed in range(repeats)]
    found = grid(group_settings(rows))
    return found.rows[0][found.headings.index("epsilon")]


PRINTED: dict[str, Callable[[float, float], tuple[str, str, str]]] = {
    "terminal": lambda e, d: (guarantee_lines([row(e, d)])[1], "epsilon ", "delta "),
    "report": lambda e, d: (guarantee_sentences([row(e, d)])[0], "epsilon ", "delta "),
    "sweep report": lambda e, d: (swept(e, d), "epsilon ", "delta "),
    "advice": lambda e, d: (advised(e, d), "epsilon ", "delta "),
    "markdown": lambda e, d: (in_table("markdown", e, d).splitlines()[-1], "dp_sgd", "dp_sgd"),
}


@pytest.mark.parametrize("where", PRINTED)
@settings_of(max_examples=60, deadline=None)
@given(epsilon=BOUNDS, delta=st.floats(1e-12, 0.09))
def test_a_printed_epsilon_is_no_less_than_the_true_one(where: str, epsilon: float, delta: float) -> None:
    text, before, after = PRINTED[where](epsilon, delta)
    assert read(text, before) >= epsilon
    assert where == "markdown" or read(text, after) >= delta


@settings_of(max_examples=100, deadline=None)
@given(epsilon=BOUNDS)
def test_an_epsilon_in_a_table_is_no_less_than_the_true_one(epsilon: float) -> None:
    assert read(in_grid(epsilon, 1)) >= epsilon
    assert read(in_grid(epsilon, 2)) >= epsilon
    assert read(measure_value_text("epsilon", epsilon)) >= epsilon
    assert read(format_measure("epsilon", epsilon)) >= epsilon
    view = RunView(Console(file=io.StringIO()))
    view.accounted([row(epsilon)])
    assert read(view._privacy["arm"]) >= epsilon


def test_a_bound_that_somebody_wrote_is_printed_as_it_is() -> None:
    for written in ("1e-05", "0.001", "0.0001", "0.1", "8", "2.96"):
        assert format_upper(float(written)) == format_lower(float(written)) == written


def test_exported_tables_keep_bounds() -> None:
    for epsilon in (9.23496, 9.234961234, 1234567.89):
        latex = next(line for line in in_table("latex", epsilon, 0.00012345678).splitlines() if "sample" in line)
        cells = [cell.strip() for cell in latex.split("&")]
        assert float(cells[3]) >= epsilon
        assert float(cells[4]) >= 0.00012345678
        csv = in_table("csv", epsilon, 0.00012345678).splitlines()[1].split(",")
        assert float(csv[3]) == epsilon


def test_the_reports_templates_print_bounds_through_one_filter() -> None:
    templates = list((REPOSITORY / "rayfed" / "report" / "html").glob("*.j2"))
    assert templates
    for template in templates:
        for shown in re.findall(r"\{\{[^{}]*\b(?:epsilon|delta)\b[^{}]*\}\}", template.read_text()):
            assert re.search(r"\| (at_most|caution) \}\}", shown), f"{template}: {shown}"  # a clause without a number


@settings_of(max_examples=40, deadline=None)
@given(multiplier=st.floats(0.01, 100))
def test_a_printed_noise_is_no_more_than_the_true_one(multiplier: float) -> None:
    work = ClientWork(samples=100, batch_size=7, steps=2, rounds=3)
    for sampling in ("fixed", "poisson"):
        setting = PrivacySetting((work,) * 7, 3, 5, sampling, "poisson", 4)  # type: ignore[arg-type]
        for name in ("dp_sgd", "fed_cdp", "dp_fedavg"):
            spent = registry.find("defences", name)(noise_multiplier=multiplier).spends(setting)
            assert read(spent.mechanism, "noise of ") <= multiplier
            if name == "dp_fedavg" and sampling == "poisson":
                assert read(spent.mechanism, "probability ") >= 3 / 7
        spent = registry.find("defences", "gaussian")(sigma=multiplier, clip=0.7).spends(setting)
        assert read(spent.mechanism, "noise of ") <= spent.releases[0].multiplier


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("name", "field"),
    [("gaussian", "sigma"), ("gaussian", "clip"), ("laplace", "scale"), ("dp_sgd", "clip"), ("dp_fedavg", "clip")],
)
def test_bounds_and_noise_are_finite(name: str, field: str, bad: float) -> None:
    """Infinite noise printed an epsilon of 0, and an infinite bound is none."""
    with pytest.raises(ValidationError, match="finite"):
        registry.build("defences", name, {"noise_multiplier": 1.0} | {field: bad} if "dp" in name else {field: bad})


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), pytest.param(0.5, 60, marks=pytest.mark.slow)])
def test_the_accountant_errs_on_the_safe_side(method: Method, multiplier: float, count: int) -> None:
    """Of a Gaussian mechanism the exact figure is known: Balle and Wang 2018, theorem 8, with sigma / sqrt(count)."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    for delta in (1e-3, 1e-6, 1e-9):
        exact = get_epsilon_gaussian(multiplier / count**0.5, delta)
        assert compute_guarantee([Release("gaussian", multiplier, count)], delta, method).epsilon >= exact
