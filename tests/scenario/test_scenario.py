"""The scenario's schema: what it accepts, and what it says when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rayfed import scenario
from rayfed.errors import ScenarioError
from rayfed.evidence.arms import arm_spec, pairs_by_name

MINIMAL = "name: x\nfederation: {rounds: 2, clients: 4}\n"


def problems(text: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        scenario.parse(text, "s.yaml", changes)
    return str(caught.value)


def test_minimal_scenario_takes_the_defaults() -> None:
    s = scenario.parse(MINIMAL)
    assert (s.data.name, s.federation.aggregation.name, s.clients_per_round, scenario.resolve(s)["none"].server_lr) == (
        "digits",
        "fedavg",
        4,
        1.0,
    )
    assert [arm.defences for arm in scenario.resolve(s).values()] == [[]]


def test_dump_loads_to_the_same_scenario() -> None:
    text = MINIMAL + "arms: {a: [], b: [{name: gaussian, sigma: 0.5}]}\nattacks:\n"
    text += "- {name: dlg, knowledge: [labels], observes: gradient, batch_size: 4}\n- {name: idlg, batch_size: 1}\n"
    first = scenario.parse(text)
    assert scenario.parse(first.dump()) == first


def test_all_errors_at_once_with_line_and_path() -> None:
    text = """\
name: x
trainning: {lr: 1}
training: {lr: fast}
federation: {rounds: 0, clients: 10}
defences:
  - {name: gaussian, sigma: -0.1}
  - {name: gausian}
"""
    message = problems(text)
    assert "5 problems" in message
    assert "line 2: trainning: unknown key; did you mean 'training'?" in message
    assert "line 3: training.lr: found 'fast'" in message
    assert "line 4: federation.rounds: found 0; input should be greater than or equal to 1" in message
    assert "line 6: defences.0.sigma: found -0.1; input should be greater than or equal to 0" in message
    assert "line 7: defences.1.name: unknown defence 'gausian': did you mean 'gaussian'?" in message


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("defences: [{name: gaussian, sigma: 1, clp: 2}]", "did you mean 'clip'"),
        ("defences: [{name: prune}]", "defences.0.ratio: required, but not given"),
        (
            "data: {name: mnist}",
            "data.root: required, but not given (or --set data.root=VALUE): folder of the files; `~` and environment",
        ),
        ("attacks: [{name: dlg, victms: 2}]", "did you mean 'victims'"),
        ("null: 1", "scenario: found None; keys should be strings"),
        ("attacks: [{name: dlg, rounds: [2]}]", "attacks.0.rounds: found round 2"),
        ("attacks: [{name: dlg, victims: 5}]", "attacks.0.victims: found 5, but only 4 clients"),
        ("attacks: [{name: dlg, victims: [4]}]", "attacks.0.victims: found 4"),
        ("attacks: [{name: dlg, victims: [1, 1]}]", "attacks.0.victims: found [1, 1]"),
        ("attacks: [{name: dlg, victims: []}]", "attacks.0.victims: is empty"),
        ("attacks: [{name: dlg, rounds: []}]", "attacks.0.rounds: is empty"),
        ("attacks: [{name: dlg, batch_size: 4}]", "attacks.0.batch_size: found 4, but"),
        ("attacks: [{name: dlg}, {name: dlg}]", "give this attack a unique `label`"),
        ("attacks: [{name: dlg, knowledge: [lables]}]", "attacks.0.knowledge.0"),
        ("attacks: [{name: dlg, knowledge: [public]}]", "set `data.public`"),
        ("data: {name: digits, public: 1}", "data.public"),
        ("training: {epochs: 1, steps: 1}", "either `epochs` or `steps`"),
        ("training: {algorithm: fedsgd, epochs: 1}", "training.algorithm: fedsgd has no local steps; remove epochs"),
        ("training: {algorithm: fedsgd, optimiser: adam}", "training.optimiser: adam needs"),
        ("training: {optimiser: adam, momentum: 0.5}", "training.optimiser: adam needs"),
        (
            "training: {algorithm: fedsgd, weight_decay: 0.1}",
            "training.algorithm: fedsgd has no local steps; remove weight_decay",
        ),
        ("training: {schedule: {kind: step}}", "training.schedule.rounds: required by kind: step"),
        ("training: {schedule: {kind: cosine, rounds: 1}}", "training.schedule.rounds: found 1"),
        ("training: {schedule: {kind: milestones}}", "training.schedule.milestones: required"),
        ("training: {schedule: {kind: step, rounds: 1, milestones: [1]}}", "training.schedule.milestones: not used"),
        ("training: {schedule: {kind: milestones, milestones: [1, 1]}}", "training.schedule.milestones: a round is"),
        ("training: {nesterov: true}", "training.nesterov: needs"),
        ("training: {nesterov: true, momentum: 0.9}\nattacks: [{name: dlg}]", "attacks.0.observes: steps with"),
        ("training: {optimiser: adam}\nattacks: [{name: dlg}]", "attacks.0.observes: an update after steps of Adam"),
        ("training: {optimiser: adamw}\nattacks: [{name: dlg}]", "attacks.0.observes: an update after steps of Adam"),
        ("arms: {a: []}\ndefences: [{name: prune, ratio: 0.5}]", "not both"),
        ("defences: [{name: prune, ratio: 1.0}]", "less than 1"),
        ("defences: [{name: quantise, bits: 40}]", "less than or equal to 28"),
        ("model: {name: no.such.module:Net}", "cannot import 'no.such.module'"),
        ("model: {name: json:Net}", "module 'json' has no 'Net'"),
        (
            "model: {name: mlp, normalise: {men: [0.5], std: [1]}}",
            "model.normalise.men: unknown key; did you mean 'mean'",
        ),
        ("epochs: 3", "epochs: unknown key; it belongs to 'training'"),
        ("model: {name: ':Net'}", "unknown model ':Net'"),
        ("model: {name: 'json:'}", "unknown model 'json:'"),
    ],
)
def test_one_error(extra: str, expected: str) -> None:
    assert expected in problems(MINIMAL + extra)


@pytest.mark.parametrize(
    ("extra", "place", "message"),
    [
        (
            "attacks: [{name: dlg, victims: [x]}]",
            "attacks.0.victims.0",
            "found 'x'; input should be a valid integer, unable to parse string as an integer",
        ),
        (
            "attacks: [{name: dlg, victims: x}]",
            "attacks.0.victims",
            "found 'x'; input should be a valid integer, unable to parse string as an integer, or input should be a "
            "valid list",
        ),
        ("arms: {a: [{name: gaussian, sigma: [x]}]}", "arms.a.0.sigma", "input should be a valid number"),
    ],
)
def test_a_field_of_several_types_is_told_once(extra: str, place: str, message: str) -> None:
    """One line, at the place that the user wrote, without the names of types."""
    found = problems(MINIMAL + extra)
    assert "1 problem\n" in found
    assert found.endswith(f": {place}: {message}")


@pytest.mark.parametrize(
    ("code", "expected"),
    [("def Net(:", "SyntaxError: "), ("import json\njson.nothing", "AttributeError: module 'json'"), ("1 / 0", "Zero")],
)
def test_a_module_of_the_user_that_fails(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_net.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    message = problems(MINIMAL + "model: {name: 'failing_net:Net'}")
    assert f"the module 'failing_net' of model 'failing_net:Net' fails when it is imported: {expected}" in message


def test_a_module_of_the_user_may_have_a_method_called_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from torch import nn\nclass Net(nn.Module):\n    def build(self): ...\n"
    (tmp_path / "building_net.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert scenario.parse(MINIMAL + "model: {name: 'building_net:Net', width: 8}").model.name == "building_net:Net"


def test_not_yaml_and_not_a_mapping() -> None:
    assert "not valid YAML" in problems("name: [x")
    assert "not valid YAML: month must be in 1..12" in problems("name: 2024-13-45")
    assert "not valid YAML: an anchor refers to itself" in problems("name: &a [*a]")
    assert "expected `key: value` lines, found a list" in problems("- a\n- b\n")
    assert "the file is empty" in problems("")


def test_mistakes_of_one_field_do_not_hide_those_of_fields_together() -> None:
    text = """\
name: x
federation: {rounds: 3, clients: abc}
training: {epochs: 2, steps: 3}
model: lenett
attacks: [{name: idlg, rounds: [9]}]
sweep: {fields: {output: [1]}}
"""
    message = problems(text)
    assert "line 2: federation.clients: found 'abc'" in message
    assert "line 3: training.steps: give either `epochs` or `steps`, not both" in message
    assert "line 4: model.name: unknown model 'lenett'" in message
    assert "line 5: attacks.0.rounds: found round 9" in message
    assert "line 6: sweep.fields.output: cannot vary" in message
    # what depends on the unknown is not told: nobody knows how many rounds or clients there are
    unknown = problems(
        "name: x\nfederation: {rounds: a, clients: 0}\nattacks: [{name: idlg, rounds: [9], victims: 7}]\n"
    )
    assert "2 problems" in unknown


def test_a_mistake_of_a_change_is_that_changes() -> None:
    text = MINIMAL + "training: {lr: 0.1}\nattacks: [{name: idlg, victims: 4}]\n"
    message = problems(text, "training.lr=fast", "trainning.lr=1", "federation.clients=2")
    assert "after --set training.lr=fast, --set trainning.lr=1, --set federation.clients=2: 3 problems" in message
    assert "line 4: attacks.0.victims: found 4, but only 2 clients" in message
    assert "  --set training.lr=fast: training.lr: found 'fast'" in message
    assert "  --set trainning.lr=1: trainning: unknown key" in message
    both = problems(text, "attacks.7.lr=1", "name.deeper=1")
    assert "--set attacks.7.lr=1" in both
    assert "--set name.deeper=1" in both


def test_a_repeated_key_is_reported_once_with_both_lines() -> None:
    message = problems(MINIMAL + "training:\n  lr: 0.1\ntraining:\n  lr: 0.2\nmodel: {name: mlp, name: lenet}\n")
    assert "2 problems" in message
    assert "line 5: training: duplicate of line 3" in message
    assert "line 7: model.name: duplicate of line 7" in message


def test_changes_are_yaml_and_reach_into_lists() -> None:
    text = MINIMAL + "defences: [{name: gaussian, sigma: 1}, prune]\n"
    changes = ["training.lr=0.5", "defences.0.sigma=0.25", "federation.aggregation=median", "defences.prune.ratio=0.5"]
    s = scenario.parse(text, changes=changes)
    assert s.defences[1].parameters == {"ratio": 0.5}
    assert s.training.lr == 0.5
    assert s.defences[0].parameters == {"sigma": 0.25}
    assert s.federation.aggregation.name == "median"


@pytest.mark.parametrize(
    "change", ["training.lr", "attacks.0=1", "name.deeper=1", "federation.0=1", "name=2024-13-45", "name=&a [*a]"]
)
def test_a_change_that_fits_nowhere(change: str) -> None:
    assert f"--set {change}" in problems(MINIMAL, change)


def test_attack_fields_do_not_hide_an_attacks_own_parameters() -> None:
    from rayfed import registry

    for spec in (scenario.AttackSpec, scenario.ModelSpec, scenario.DefenceSpec, scenario.DataSpec):
        for name in registry.table(spec.kind):
            own = {p.name for p in registry.parameters(registry.find(spec.kind, name))}
            assert not own & set(spec.model_fields), f"{spec.kind} {name}"


def test_json_schema_knows_components_and_their_fields() -> None:
    schema = json.loads(json.dumps(scenario.json_schema()))
    prune = next(o for o in schema["$defs"]["DefenceSpec"]["anyOf"] if o.get("title") == "prune")
    assert prune["properties"]["ratio"]["minimum"] == 0
    assert prune["required"] == ["name", "ratio"]


def test_template_of_new_is_valid() -> None:
    from importlib.resources import files

    text = files("rayfed").joinpath("new_scenario.yaml").read_text()
    assert scenario.parse(text.replace("NAME", "mine")).name == "mine"
    assert yaml.safe_load(text)["arms"]["none"] == []


ARMS = """
training: {batch_size: 4, lr: 0.5}
model: {name: lenet, activation: sigmoid, batch_norm: eval}
arms:
  plain: []
  large: {training: {batch_size: 64}, defences: [{name: prune, ratio: 0.5}]}
  other: {model: {name: convnet, width: 4}}
"""


def test_an_arm_can_set_training_and_model_otherwise() -> None:
    s = scenario.parse(MINIMAL + ARMS)
    arms = scenario.resolve(s)
    assert [arm.training.batch_size for arm in arms.values()] == [4, 64, 4]
    assert arms["large"].training.lr == 0.5
    assert [d.name for d in arms["large"].defences] == ["prune"]
    assert arms["large"].model == s.model
    other = arms["other"].model
    assert (other.name, other.parameters, other.batch_norm) == ("convnet", {"width": 4}, "eval")
    assert scenario.parse(s.dump()) == s


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("arms.large.training.stepz=4", "arms.large.training.stepz: unknown key; did you mean 'steps'"),
        ("arms.large.training.lr=-1", "arms.large.training.lr: found -1; input should be greater than 0"),
        ("arms.large.training.algorithm=fedsgd", None),
        (
            "arms.large.training={algorithm: fedsgd, steps: 3}",
            "arms.large.training.algorithm: fedsgd",
        ),
        ("arms.other.model.widht=3", "arms.other.model.widht: unknown key; did you mean 'width'"),
        ("arms.other.model.name=convnot", "arms.other.model.name: unknown model 'convnot': did you mean 'convnet'"),
        ("arms.other.model.train=true", "arms.other.model.train: found True; input should be a valid dictionary"),
        ("arms.other={defenses: []}", "arms.other.defenses: unknown key; did you mean 'defences'"),
        ("arms.large.defences.0.ratio=2", "arms.large.defences.0.ratio: found 2; input should be less than 1"),
    ],
)
def test_errors_of_an_arm_stand_where_it_is_set(change: str, expected: str | None) -> None:
    if expected is None:
        changed = scenario.parse(MINIMAL + ARMS, changes=[change])
        assert scenario.resolve(changed)["large"].training.algorithm == "fedsgd"
    else:
        assert expected in problems(MINIMAL + ARMS, change)


def test_a_mistake_that_all_arms_have_is_told_once() -> None:
    text = "name: t\nfederation: {rounds: 2, clients: 2}\ntraining: {schedule: {kind: step}}\narms: {a: [], b: []}\n"
    with pytest.raises(ScenarioError, match="1 problem\n"):
        scenario.parse(text)
    with pytest.raises(ScenarioError, match=r"arms\.b\.training\.steps"):
        scenario.parse(text.replace("b: []", "b: {training: {epochs: 1, steps: 2}}"))


@pytest.mark.parametrize("written", ["torchvision:resnet18", "timm:resnet18", "hf:folder", "mlp", "my_module:Net"])
def test_a_model_is_titled_as_it_is_written(written: str) -> None:
    assert scenario.ModelSpec.model_validate({"name": written}).title == written


def test_an_arm_may_be_called_as_an_arm_with_an_opponent() -> None:
    found = scenario.parse(f"{MINIMAL}arms: {{dp: [{{name: gaussian, sigma: 2}}], 'dp vs strong': []}}\n")
    assert {name: [d.name for d in arm.defences] for name, arm in found.played.items()} == {
        "dp": ["gaussian"], "dp vs strong": [],
    }  # fmt: skip
    document = found.model_dump(mode="json")
    assert arm_spec(document, "dp vs strong")["defences"] == []
    assert pairs_by_name(document) == {"dp": ("dp", ""), "dp vs strong": ("dp vs strong", "")}
    against = scenario.parse(f"{MINIMAL}arms: {{dp: [], 'a vs b': []}}\nopponents: {{'c vs d': null}}\n")
    assert pairs_by_name(against.model_dump(mode="json")) == {
        "dp vs c vs d": ("dp", "c vs d"), "a vs b vs c vs d": ("a vs b", "c vs d"),
    }  # fmt: skip
    assert list(against.played) == ["dp vs c vs d", "a vs b vs c vs d"]


@pytest.mark.parametrize(
    ("arms", "opponents", "place"),
    [
        ("{a: [], 'a vs b': []}", "{'b vs c': null, c: null}", "c"),
        ("{dp: [], 'dp vs strong': []}", "{strong: null}", "strong"),
    ],
)
def test_two_arms_may_not_have_the_same_name_in_tables(arms: str, opponents: str, place: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario.parse(f"{MINIMAL}arms: {arms}\nopponents: {opponents}\n")
    assert [where for where, _ in caught.value.problems] == [("opponents", place)]


def test_pairs_of_earlier_versions_are_read() -> None:
    arms = {"mean vs nobody": {"malicious": None}, "mean vs flip": {"malicious": {"name": "label_flip"}}}
    assert pairs_by_name({"arms": arms}) == {"mean vs nobody": ("mean", "nobody"), "mean vs flip": ("mean", "flip")}


def test_a_grant_is_known_by_its_short_name_however_it_is_written() -> None:
    attack = "{name: idlg, observes: gradient, knowledge: ['rayfed.threat_model.grants.labels:KnownLabels']}"
    assert scenario.parse(f"{MINIMAL}attacks: [{attack}]\n").attacks[0].knowledge == ["labels"]


def test_an_unknown_key_of_a_range_is_named_with_its_path() -> None:
    document = {"name": "t", "data": {"name": "digits", "size": 8}, "model": "mlp", "federation": {"clients": 2}}
    swept = document | {"sweep": {"fields": {"training.lr": {"low": 0.01, "high": 0.1, "hihg": 0.2}}}}
    with pytest.raises(ScenarioError, match=r"sweep\.fields\.training\.lr\.hihg"):
        scenario.check_scenario(swept, "t")
