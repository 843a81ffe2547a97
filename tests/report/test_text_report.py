"""From a victim's text to the report: rows of tables, the true text beside the rebuilt one, nothing unescaped."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from rayfed import scenario as scenarios
from rayfed.gradients import buffers_of, weights_of
from rayfed.report.html.run import write_report
from rayfed.samples import Tokens
from rayfed.simulation.client.runtime import Sent
from rayfed.simulation.client.visit import ObservationRequest
from rayfed.simulation.executors.attacker import AttackWorker
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.rounds.attacks import AttackCall, note_attack
from rayfed.simulation.tables import RoundTables
from rayfed.store.folder import SCENARIO, RunFolder

TEXT = "data: text, model: {name: text_transformer, width: 32}, attacks: [{name: dager, observes: gradient}]"
TABLE = "data: diabetes, model: mlp, attacks: [{name: analytic, observes: gradient}]"


def attacked(text: str, folder: Path, spoil: bool = False) -> tuple[RunFolder, RoundTables]:
    """What workers make of one victim; its tables in a run folder."""
    scenario = scenarios.parse(f"{{name: t, federation: {{rounds: 1, clients: 2}}, {text}}}")
    inputs, [attack] = prepare_inputs(scenario), scenario.attacks
    data = inputs.data
    if spoil:
        assert isinstance(data.sample, Tokens)
        vocabulary = tuple("<b>&" for _ in data.sample.vocabulary)
        data = replace(data, sample=replace(data.sample, vocabulary=vocabulary))
    client = ClientWorker(scenario, data, inputs.parts, torch.device("cpu"))
    net = client.arm("none").model
    sent = Sent(0, weights_of(net), buffers_of(net))
    _, seen, truths = client.observe(sent, ObservationRequest("none", [0], attack))
    attacker = AttackWorker(data.sample, len(data.classes), torch.device("cpu"))
    bare, found = attacker.attack(attack, client.specs["none"], seen, [b"0"])
    tables = RoundTables()
    call = AttackCall(client.specs["none"], attack, (0,), 0, strip=True)
    note_attack(tables, call, 0, bare, client.score(truths, found, strip=True))
    run = RunFolder.create(str(folder), "t", datetime(2026, 1, 1))
    run.write_text(SCENARIO, scenario.dump())
    for name in ("attacks", "texts"):
        run.write_part(name, 0, getattr(tables, name))
    return run, tables


def test_a_text_is_shown_as_a_text(tmp_path: Path) -> None:
    run, tables = attacked(TEXT, tmp_path)
    [row], [text] = tables.attacks, tables.texts
    assert (row["token_accuracy"], row["rouge1"], row["rougeL"]) == (1, 1, 1)
    assert row.get("psnr") is None
    assert (tables.images, tables.snapshots) == ([], [])
    assert text["true"] == text["reconstructed"]
    assert text["right"] == [True] * 16
    page = Path(write_report(run)).read_text()
    assert f"<span>{text['true'][3].replace('&', '&amp;')}</span>" in page


def test_a_record_is_shown_by_its_columns(tmp_path: Path) -> None:
    run, tables = attacked(TABLE, tmp_path)
    [row], [text] = tables.attacks, tables.texts
    assert row["feature_accuracy"] == 1
    assert text["true"][1] in ("sex 1", "sex 2")
    page = Path(write_report(run)).read_text()
    assert f"<span>{text['true'][1]}</span>" in page


def test_what_stands_in_a_text_is_no_markup(tmp_path: Path) -> None:
    run, tables = attacked(TEXT, tmp_path, spoil=True)
    assert tables.texts[0]["true"][0] == "<b>&"
    page = Path(write_report(run)).read_text()
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page


@pytest.mark.parametrize("text", [TEXT, TABLE])
def test_the_table_of_texts_comes_back(tmp_path: Path, text: str) -> None:
    run, tables = attacked(text, tmp_path)
    [row] = run.read_table("texts").to_pylist()
    assert row["true"] == tables.texts[0]["true"]
    assert row["right"] == tables.texts[0]["right"]
