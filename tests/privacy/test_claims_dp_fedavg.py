"""What `dp_fedavg` promises of rounded sums under masks, and of clients that collude, against exact laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from rayfed import scenario as scenarios
from rayfed.aggregation.noisy_sum import NoisySum
from rayfed.aggregation.server import GlobalModel
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.crypto import masking
from rayfed.crypto.masking import Advertised, Transcript
from rayfed.defences.dp_fedavg import DpFedAvg, multiplier_of_rounded
from rayfed.errors import UserError
from rayfed.privacy.accountant import Release, compute_guarantee
from rayfed.privacy.spending import ClientWork, PrivacySetting
from rayfed.protections.secure_aggregation import Dropouts, SecureAggregation
from rayfed.scenario import resolve
from rayfed.simulation.client import plan
from rayfed.simulation.client.arm import aggregation_of
from rayfed.simulation.client.local import update_method
from rayfed.simulation.client.runtime import ClientRuntime, Sent
from rayfed.simulation.inputs import Inputs, prepare_inputs
from rayfed.update import Named, Update

TEXT = """
name: x
data: {name: digits, size: 8, train_samples: 200, test_samples: 50}
model: {name: mlp, hidden: [16]}
training: {epochs: 1, batch_size: 30, lr: 0.1}
federation: {rounds: 4, clients: 6}
"""
NOISY = "{name: dp_fedavg, noise_multiplier: 4, clip: 0.5, noise: clients}"
MASKS = "{name: secure_aggregation}"


def inputs(defence: str = NOISY, protection: str = "null", **changes: str) -> Inputs:
    text = TEXT + f"arms: {{dp: {{defences: [{defence}], protection: {protection}}}}}\n"
    return prepare_inputs(scenarios.parse(text, changes=[f"{k.replace('__', '.')}={v}" for k, v in changes.items()]))


def claimed(defence: str = NOISY, protection: str = "null", **changes: str) -> dict[str, Any]:
    [row] = inputs(defence, protection, **changes).privacy
    return row


def setting(clients: int, drawn: int, rounds: int = 1, **known: Any) -> PrivacySetting:
    return PrivacySetting(
        clients=(ClientWork(10, 10, 1, rounds),) * clients,
        clients_per_round=drawn,
        rounds=rounds,
        client_sampling="fixed",
        sample_sampling="shuffle",
        layers=1,
        **known,
    )


# Noise of clients under masks


def test_the_noise_of_clients_has_an_epsilon_under_masks() -> None:
    plain, masked = claimed(), claimed(protection=MASKS)
    assert masked["epsilon"] == plain["epsilon"]
    assert masked["epsilon"] == pytest.approx(
        compute_guarantee([Release("gaussian", 4 * (5 / 6) ** 0.5, 4)], 1e-5).epsilon, rel=1e-4
    )
    assert "rounded to steps of 9.54e-07," in masked["mechanism"]
    assert "no single update" in masked["against"]


def test_a_large_delta_is_refused_with_what_it_means() -> None:
    with pytest.raises(UserError, match=r"found 0\.95; should be less than 0\.1"):
        claimed(NOISY.replace("}", ", delta: 0.95}"))


def test_whom_noise_of_clients_is_against_says_what_the_server_sees() -> None:
    plain, masked = claimed()["against"], claimed(protection=MASKS)["against"]
    assert "up to 1 client colluding" in plain
    assert "up to 2 clients colluding" in claimed(NOISY.replace("}", ", colluders: 2}"))["against"]
    assert "NOT this arm's server, which sees single updates" in plain
    assert "NOT" not in masked
    assert "if it follows the protocol (honest but curious)" in masked


@pytest.mark.parametrize(
    ("defence", "protection", "note"),
    [
        (NOISY, "ckks", "encryption rounds"),
        (NOISY.replace("clients", "server"), "ckks", "encryption rounds"),
        (NOISY.replace("clients", "server"), MASKS, "noise: clients"),
        (
            NOISY.replace("}", ", colluders: 4}"),
            "{name: secure_aggregation, threshold: 4}",
            "single update",
        ),
        (
            NOISY.replace("}", ", colluders: 3}"),
            "{name: secure_aggregation, neighbours: 4, threshold: 4, dropouts: {mask: 1}}",
            "single update",
        ),
    ],
)
def test_what_protections_do_not_keep_has_no_epsilon(defence: str, protection: str, note: str) -> None:
    row = claimed(defence, protection)
    assert "epsilon" not in row
    assert note in row["note"]


def rounded(mean: float, deviation: float, reach: int) -> np.ndarray:
    """The law of a Gaussian rounded to the nearest whole number, from -reach to reach."""
    edges = np.arange(-reach, reach + 2) - 0.5
    below, above = stats.norm.cdf(edges, mean, deviation), stats.norm.sf(edges, mean, deviation)
    return np.where(edges[1:] < mean, np.diff(below), -np.diff(above))  # exact in both tails


def law(means: Sequence[float], deviation: float, reach: int = 300) -> np.ndarray:
    """Of the sum of such Gaussians, each rounded by itself."""
    found = np.ones(1)
    for mean in means:
        found = np.convolve(found, rounded(mean, deviation, reach))
    return found


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    """The smallest delta of two laws at an epsilon, in both directions."""
    return max(float((a - np.exp(epsilon) * b).clip(0).sum()) for a, b in ((p, q), (q, p)))


@pytest.mark.parametrize(("values", "step"), [(1, 1.0), (1, 0.25), (1, 0.05), (2, 1.0)])
@pytest.mark.parametrize(("drawn", "missing", "colluders"), [(2, 0, 1), (3, 0, 1), (5, 1, 1), (6, 1, 2)])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 3.0])
def test_the_sum_of_rounded_parts_keeps_to_the_printed_epsilon(
    step: float, drawn: int, missing: int, colluders: int, multiplier: float, values: int
) -> None:
    """A clip bound of one; what the honest clients without the victim send is whatever it is."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    delta, draw, honest = 1e-3, np.random.default_rng(drawn), drawn - missing - colluders
    left = multiplier_of_rounded(multiplier, drawn, honest, values, step)
    epsilon = get_epsilon_gaussian(left, delta)  # exact
    part, others = multiplier / drawn**0.5 / step, honest - 1
    reach = int(10 * part + 2 / step + 5)
    for beside in draw.uniform(-1 / step, 1 / step, (5, others)):
        laws: list[np.ndarray] = []
        for victim in (1 / values**0.5 / step, 0.0):
            one = law([victim, *beside], part, reach)
            laws.append(one if values == 1 else np.outer(one, one).ravel())
        assert hockey_stick(laws[0], laws[1], epsilon) <= delta * (1 + 1e-9)


def test_rounding_that_is_not_accounted_breaks_a_promise() -> None:
    """So the test before this one can fail: noise of a tenth of a step vanishes in the rounding."""
    naive = compute_guarantee([Release("gaussian", 1.0, 1)], 1e-3).epsilon
    with_victim, without = law([10.0, 0.0, 0.0, 0.0], 0.1), law([0.0] * 4, 0.1)
    assert hockey_stick(with_victim, without, naive) > 0.9


def sums(found: Inputs, chosen: str = "dp") -> tuple[Named, Any, Any]:
    """A round without Ray, at a server that has no secrets: its step, the session, and the rule."""
    s = found.scenario
    runtime = ClientRuntime(s, found.data, found.parts, torch.device("cpu"))
    rule = aggregation_of(resolve(s)[chosen])
    members, sent = plan.drawn_clients(s, 0), Sent(0, runtime.arm(chosen).weights, runtime.arm(chosen).buffers)
    protecting = plan.protecting(s, resolve(s)[chosen], found.parts.sizes)
    if protecting is None:
        total, _ = runtime.cohort(chosen, sent, members, {})
        return rule.combine(total, torch.Generator())[0], total, rule
    server = protecting.wrap(rule)
    transcripts: dict[int, Transcript] = {c: {} for c in members}

    def consulted(known: Any) -> Any:
        while question := known.request():
            said = {c: runtime.answer(chosen, sent, question.payload, c, {}, transcripts[c])[1] for c in members}
            known = known.receive(said)
        return known

    session = consulted(server.begin_round(members, {}))
    partial, report = runtime.cohort(chosen, replace(sent, broadcast=session.broadcast()), members, {})
    assert {row["clipped"] for row in report.rows} == {0}
    total = consulted(session.finalise(partial))
    return server.combine(total, torch.Generator())[0], total, server


def vector(named: Named) -> np.ndarray:
    return torch.cat([t.flatten() for t in named.values()]).double().numpy()


@pytest.mark.parametrize("bits", [32, 12])
def test_masks_neither_round_nor_clip_what_bears_noise(bits: int) -> None:
    """Whatever their own clip bound and bits are."""
    masks = f"{{name: secure_aggregation, clip: 0.1, bits: {bits}}}"
    (masked, total, _), (plain, _, rule) = sums(inputs(protection=masks)), sums(inputs())
    assert np.abs(vector(plain)).max() > 0.5
    assert total.opened is not None
    np.testing.assert_array_equal(total.opened[:-1].view(np.int64), np.rint(6 * vector(plain) / rule.step))
    np.testing.assert_allclose(vector(masked), vector(plain), rtol=1e-6)


def test_what_is_sent_is_whole_multiples_of_the_step() -> None:
    """In 32-bit floats without a loss, the noise drawn more finely."""
    found = inputs()
    s = found.scenario
    runtime = ClientRuntime(s, found.data, found.parts, torch.device("cpu"))
    task = runtime.task("dp", Sent(0, runtime.arm("dp").weights, {}), 0, found.parts[0], {})
    sent = vector(update_method(s.training, runtime.arm("dp").defences)(task).tensors)
    rule = aggregation_of(resolve(s)["dp"])
    assert rule.step == 2.0**-20  # type: ignore[attr-defined]
    steps = sent * 2**20
    assert (steps == np.rint(steps)).all()
    assert np.abs(steps).max() < 2**24
    assert len(np.unique(steps % 16)) == 16


@pytest.mark.parametrize(("dropouts", "parts"), [("{}", 6), ("{mask: 2}", 4), ("{reveal: 2}", 6)])
def test_noise_of_drop_outs_is_missing_in_the_sum_and_in_the_account(dropouts: str, parts: int) -> None:
    masks = f"{{name: secure_aggregation, threshold: 4, dropouts: {dropouts}}}"
    loud, quiet = (sums(inputs(NOISY.replace("4", z), masks))[0] for z in ("4", "0.0001"))
    noise = (vector(loud) - vector(quiet)) * 6 / (4 * 0.5)
    assert stats.kstest(noise / (parts / 6) ** 0.5, "norm").pvalue > 1e-3
    rest = Release("gaussian", 4 * ((parts - 1) / 6) ** 0.5, 4)  # one colludes
    assert claimed(protection=masks)["epsilon"] == pytest.approx(compute_guarantee([rest], 1e-5).epsilon, rel=1e-4)


def test_where_no_noise_is_left_is_said() -> None:
    with pytest.raises(UserError, match="collude or drop out"):
        inputs(NOISY.replace("}", ", colluders: 6}"))
    with pytest.raises(UserError, match="collude or drop out"):
        inputs(protection="{name: secure_aggregation, threshold: 2, dropouts: {mask: 5}}")


@pytest.mark.parametrize("neighbours", [2, 4, 6])
def test_colluders_that_masks_withstand_cut_nobody_off(neighbours: int) -> None:
    """In a ring with k neighbours, k colluders or drop-outs are the fewest that leave two parts."""
    keys = {client: Advertised(bytes([client]) * 32, bytes([client + 10]) * 32) for client in range(10)}
    near = masking.neighbours(keys, neighbours)

    def whole(gone: tuple[int, ...]) -> bool:
        left = set(range(10)) - set(gone)
        reached, border = set[int](), {min(left)}
        while border:
            reached |= border
            border = {n for c in border for n in near[c] if n in left} - reached
        return reached == left

    protection = SecureAggregation(neighbours=neighbours, threshold=neighbours + 1, dropouts=Dropouts(mask=1))
    for colluders in range(1, neighbours + 1):
        if protection.withstands(10, colluders):
            assert all(whole(gone) for gone in combinations(range(10), colluders + 1))
    assert protection.withstands(10, neighbours - 2) or neighbours == 2
    assert not protection.withstands(10, neighbours - 1)
    assert not all(whole(gone) for gone in combinations(range(10), neighbours))


# Colluders


@pytest.mark.engine
def test_whom_a_guarantee_holds_against_names_how_many_collude() -> None:
    server = NOISY.replace("clients", "server")
    four = ", colluders: 4}"
    for defence in (server, NOISY):
        assert "up to 1 client " in claimed(defence, federation__clients_per_round="5")["against"]
        more = claimed(defence.replace("}", four), federation__clients_per_round="5")
        assert "up to 4 clients " in more["against"]
    assert "any number of" in claimed(server)["against"]
    assert (
        "any number of" in claimed(server, federation__clients_per_round="3", federation__sampling="poisson")["against"]
    )


def test_the_noise_that_colluders_added_is_no_noise() -> None:
    row = claimed(NOISY.replace("}", ", colluders: 4}"))
    assert row["epsilon"] == pytest.approx(
        compute_guarantee([Release("gaussian", 4 * (2 / 6) ** 0.5, 4)], 1e-5).epsilon
    )


@pytest.mark.engine
def test_a_fixed_draw_is_one_among_those_who_do_not_collude() -> None:
    """5 of 10 in 30 rounds: the bound for draws is 7.63 for one colluder and 11.9 for four; 6.81 holds for any."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    def bound(population: int) -> float:
        event = dp_event.SampledWithoutReplacementDpEvent(population, 5, dp_event.GaussianDpEvent(4))
        accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        return float(accountant.compose(event, 30).get_epsilon(1e-5))

    assert (bound(9), bound(6)) == (pytest.approx(7.63, abs=0.005), pytest.approx(11.9, abs=0.01))
    for colluders, population in ((1, 9), (4, 6)):
        [release] = DpFedAvg(noise_multiplier=8, colluders=colluders).released(setting(10, 5, 30), 8)
        assert release.drawn == (5, population)
        assert compute_guarantee([release], 1e-5).epsilon == pytest.approx(6.813, abs=1e-3)  # of all, drawn or not
    few, many = (
        compute_guarantee(DpFedAvg(noise_multiplier=4, colluders=c).released(setting(100, 10, 30), 4), 1e-5).epsilon
        for c in (1, 40)
    )
    assert many > 1.2 * few


def test_too_many_colluders_are_refused() -> None:
    with pytest.raises(UserError, match="colluders"):
        inputs(NOISY.replace("clients", "server, colluders: 6"), federation__clients_per_round="5")


def drawn_sums(
    victim: float, other: float, clients: int, drawn: int, colluders: int, multiplier: float, grid: np.ndarray
) -> np.ndarray:
    """The law of (colluders that are drawn, noisy sum): client 0 is the victim, colluders come last and send zeros."""
    rows = np.zeros((drawn + 1, len(grid)))
    draws = list(combinations(range(clients), drawn))
    for chosen in draws:
        known = sum(c >= clients - colluders for c in chosen)
        total = victim * (0 in chosen) + other * sum(0 < c < clients - colluders for c in chosen)
        rows[known] += stats.norm.pdf(grid, total, multiplier) / len(draws)
    return rows * (grid[1] - grid[0])


@pytest.mark.engine
@pytest.mark.parametrize(("clients", "drawn"), [(4, 1), (4, 2), (5, 3), (6, 2)])
@pytest.mark.parametrize("multiplier", [1.0, 2.0, 5.0])
def test_no_colluders_see_more_of_a_draw_than_is_printed(clients: int, drawn: int, multiplier: float) -> None:
    """One round, clip bound one, a single value, integrated."""
    delta, grid = 1e-4, np.linspace(-drawn - 9 * multiplier, drawn + 9 * multiplier, 20001)
    for colluders in range(1, clients - 1):
        defence = DpFedAvg(noise_multiplier=multiplier, colluders=colluders, delta=delta)
        printed = compute_guarantee(defence.released(setting(clients, drawn), multiplier), delta).epsilon
        for other in (-1.0, 0.0, 1.0):
            known = (other, clients, drawn, colluders, multiplier, grid)
            assert hockey_stick(drawn_sums(1.0, *known), drawn_sums(-1.0, *known), printed) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("value", [1.0, 0.1307, -3.7e-5])
def test_buffers_do_not_tell_how_many_clients_were_drawn(value: float) -> None:
    """Where each client is drawn for itself, who knows all others' draws learns the last one's from their number."""
    rule, kept = NoisySum(clients=50, deviation=1.0), torch.tensor([value])
    for drawn in range(1, 100):
        sent = [Update(i, 0, {"w": torch.zeros(1)}, {"b": kept}, 1, 0.0) for i in range(drawn)]
        total = rule.partial(sent[: drawn // 3]) if drawn >= 3 else None
        rest = rule.partial(sent[drawn // 3 :])
        model = GlobalModel({"w": torch.zeros(1)}, {"b": kept}, ServerOptimiser("sgd", 1.0))
        model.apply(*rule.combine(rest if total is None else rule.merge(total, rest), torch.Generator()))
        assert torch.equal(model.buffers["b"], kept), drawn
        assert model.buffers["b"].dtype == kept.dtype
