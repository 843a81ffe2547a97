"""Defences that only some clients of an arm use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rayfed
from rayfed.defences.gaussian import Gaussian
from rayfed.defences.prune import Prune
from rayfed.defences.refiner import Refiner
from rayfed.defences.some_clients import OnSomeClients, defences_at
from rayfed.errors import UserError
from rayfed.gradients import flatten
from rayfed.models.build import build_model
from rayfed.scenario import Training, parse
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.local import update_method
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Update
from tests.helpers.component_fixtures import required
from tests.helpers.defence_fixtures import digits, task_of

PLAIN = Training(algorithm="fedsgd", batch_size=None)


def scenario(defence: str, more: str = "") -> Any:
    return parse(
        "{name: t, data: {name: digits, size: 8}, model: {name: mlp, hidden: [8]}, federation: {rounds: 1, clients: 3},"
        f"training: {{algorithm: fedsgd, batch_size: 1}}, arms: {{some: [{defence}]}}{more}}}"
    )


@pytest.mark.parametrize("inner", [Prune(ratio=0.5), Gaussian(clip=1.0, sigma=0.1), Refiner(iterations=1)])
def test_only_the_chosen_clients_defend_themselves(inner: Any) -> None:
    task = task_of(build_model("mlp", {"hidden": [8]}, (1, 8, 8), 10, seed=0), None, data=digits(3))
    plain = flatten(update_method(PLAIN, [])(task).tensors)
    for client, defended in ((0, False), (1, True), (2, False)):
        own = replace(task, client=client, generator=torch.Generator().manual_seed(0))
        again = replace(own, generator=torch.Generator().manual_seed(0))
        sent = flatten(update_method(PLAIN, [OnSomeClients(inner, [1], "it")])(own).tensors)
        expected = flatten(update_method(PLAIN, [inner] if defended else [])(again).tensors)
        assert torch.equal(sent, expected)
        assert torch.equal(sent, plain) != defended
        (update,) = cohort_updates([replace(own, state={})], PLAIN, [OnSomeClients(inner, [1], "it")])
        assert isinstance(update, Update)
        assert torch.equal(flatten(update.tensors), plain) != defended


def test_a_number_means_the_first_clients() -> None:
    defence = Prune(ratio=0.5)
    some = OnSomeClients(defence, 2, "prune")
    assert [defences_at([some], client) for client in range(3)] == [(defence,), (defence,), ()]


@pytest.mark.parametrize(
    ("clients", "fits"), [("1", True), ("[0, 2]", True), ("4", False), ("[3]", False), ("[]", False), ("0", False)]
)
def test_clients_that_do_not_exist_are_refused(clients: str, fits: bool) -> None:
    text = f"{{name: prune, ratio: 0.5, on_clients: {clients}}}"
    if fits:
        prepare_inputs(scenario(text))
    else:
        with pytest.raises(UserError, match="clients"):
            prepare_inputs(scenario(text))


@pytest.mark.parametrize("name", ["dp_sgd", "dp_fedavg", "precode", "key_lock"])
def test_a_defence_of_all_clients_is_refused(name: str) -> None:
    options = required("defences", name) | ({"noise_multiplier": 1.0} if name.startswith("dp") else {})
    written = ", ".join(f"{key}: {value}" for key, value in options.items())
    with pytest.raises(UserError, match="`on_clients`"):
        prepare_inputs(scenario(f"{{name: {name}, on_clients: 1{', ' + written if written else ''}}}"))


def test_attackers_know_who_defends_and_there_is_no_guarantee(tmp_path: Path) -> None:
    attack = "{name: idlg, victims: [0, 1], batch_size: 1, iterations: 20, restarts: 1, knowledge: [defence, code]}"
    run = rayfed.launch(
        scenario("{name: gaussian, clip: 1.0, sigma: 100.0, on_clients: [1]}", f", attacks: [{attack}]"),
        out=tmp_path,
        executor="local",
    )
    psnr = {row["victim"]: row["psnr"] for row in run.table("attacks").to_pylist()}
    assert psnr[0] > 30 > psnr[1]
    assert [row.get("epsilon") for row in run.table("privacy").to_pylist()] == [None]
