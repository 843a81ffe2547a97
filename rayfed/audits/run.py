"""Audit of a model and its data without a scenario, as run by `rayfed audit` and `rayfed.audit`.

The audit runs the attacks that apply until its time is up, and reports the leaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic

from rayfed import scenario as scenarios
from rayfed.attacks.base import Guess
from rayfed.audits.options import Trained
from rayfed.audits.plan import UNDEFENDED, Plan, name_pipeline
from rayfed.audits.queue import BATCHES, Stage, Unit, pass_evaluations, pass_iterations, plan_stages
from rayfed.core.documents import load_yaml
from rayfed.core.memory import give_back_cache
from rayfed.errors import ClientError, UserError
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.rows import Row, Sample, get_sample_key
from rayfed.models.describe import described
from rayfed.report.text.audit import applies_text
from rayfed.report.text.weights import initial_weights
from rayfed.runs import runner
from rayfed.scenario import AttackSpec, Scenario
from rayfed.simulation.client import plan as rounds
from rayfed.simulation.client.server_message import Sent
from rayfed.simulation.client.visit import ObservationRequest
from rayfed.simulation.executors.base import Call, Execution, Ref
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import Inputs, prepare_inputs
from rayfed.simulation.progress import AuditProgress, Progress
from rayfed.simulation.rounds.attacks import AttackCall, CallResult, Deadline, note_not_run
from rayfed.simulation.rounds.federation import Federation
from rayfed.simulation.rounds.recovery import rerun_until_complete
from rayfed.simulation.tables import RoundTables
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import INAPPLICABLE, UNPLAYED, WANT_OF_TIME

Watch = Callable[[], AbstractContextManager[AuditProgress]]
"""Open the display of one stage of an audit: the inspection of the model, or the attacks on one set of weights."""

_CLOSING = 4.0
"""Seconds after the attacks for writing the report and ending processes."""
_CLOSED_FORM_SHARE = 1 / 10
"""Maximum share of the time for one call of a closed form. A slow one is not run on other arms and larger batches."""
_SLOW = 5.0
"""Seconds of a gradient above which larger batches are not checked before the attacks."""
_ONE_VALUE = "Expected more than 1 value per channel when training"
"""Start of the error that PyTorch's batch norm raises for a single value per channel."""
_BY_VICTIM = "attacks", "traces", "images", "texts", "snapshots"
"""Tables with the rows of one victim of a reconstruction attack."""


@dataclass(frozen=True)
class WeightsAudit:
    """Results of an audit for one set of weights."""

    folder: RunFolder
    weights: str
    """Description of the weights."""
    applies: bool
    """Whether any attack may apply; False if all attacks were run, and none applies."""


@dataclass(frozen=True)
class AuditBudget:
    """Time of an audit, or its number of evaluations per search."""

    deadline: Deadline
    """Time at which the command ends."""
    evaluations: int | None = None
    """Evaluations of the objective per search; then there is no time limit."""

    def deadline_of_next(self, sets: int) -> Deadline:
        """Return the deadline of the attacks on the next set of weights, if `sets` sets are left."""
        if self.evaluations is not None:
            return Deadline()
        now = self.deadline.now
        return Deadline(now() + self.deadline.left / sets - _CLOSING, now)


def run_audit(
    plan: Plan,
    budget: AuditBudget,
    execution: Execution,
    watch: Watch,
    *,
    trained: Trained | None = None,
    changes: Sequence[str] = (),
    out: str | None = None,
    shrink: bool = False,
) -> list[WeightsAudit]:
    """Run the attacks that apply until the time is up, and return the results for each set of weights.

    The weights are the model's initial ones and, if given, those of a `trained` run's arm. The list is empty
    if no attack takes such samples. `shrink` reduces batch sizes to the number of samples per client, and drops those
    that the model rejects. Raises `UserError` for invalid input, and if every attack failed.
    """
    with watch() as progress:
        inspected = _inspect(plan, changes, progress, shrink)
    give_back_cache()  # the model was inspected in this process, which shares the GPU with the actors
    if inspected is None:
        return []
    plan, inputs = inspected
    scenario = _scenario(plan, next(pass_evaluations(budget.evaluations)), changes, budget.evaluations is not None)
    initial = initial_weights(scenario.model_dump(mode="json"))
    attacked: list[tuple[str, str | None, str | None]] = [(initial, None, None)]
    if trained is not None:
        attacked.append((f"the weights of {trained.run}", trained.run, trained.arm))
    audited = []
    for place, (weights, source, learnt) in enumerate(attacked):
        deadline = budget.deadline_of_next(len(attacked) - place)
        with watch() as progress:
            progress.noted, progress.deadline = inputs.remarks, deadline.ends
            attack_round = AuditRound(plan, changes, deadline, budget.evaluations, progress)
            folder = runner.attack(scenario, source, out, execution, progress, learnt, attack_round)
            progress.audited(weights, f"{folder.url}/report.html")
        attack_round.check_failures()
        audited.append(WeightsAudit(folder, weights, attack_round.may_apply))
    return audited


_CallKey = tuple[str, str, tuple[int, ...], int]
"""Arm, title, victims and repeat of an attack call."""
_Sent = Mapping[str, Ref]
"""References to the messages that clients receive, by arm."""


class AuditRound:
    """Attacks of an audit on one set of weights, run stage by stage (`rayfed.runs.runner.AttackRound`).

    A later pass makes longer searches. The result of an earlier pass is replaced unless it is better. So the results
    depend on the finished calls of each pass, and not on their time. A call that the deadline cuts off has no result
    in its pass. If all samples of a defended arm leak at a batch size, the further attacks there come last in the pass.
    """

    def __init__(
        self,
        plan: Plan,
        changes: Sequence[str],
        deadline: Deadline,
        evaluations: int | None = None,
        progress: AuditProgress | None = None,
    ) -> None:
        """Initialise the attacks of a plan with `changes` of its scenario.

        With `evaluations`, the last pass makes so many per search.
        """
        self._plan, self._changes, self._deadline, self._evaluations = plan, changes, deadline, evaluations
        self._progress = progress or AuditProgress()
        self._criterion = Criterion.from_modality(plan.modality, plan.threshold)
        self._limit = _CLOSED_FORM_SHARE * deadline.left
        self._stage_index = 0
        """Index of the next stage in the queue."""
        self._postponed_units: list[Unit] = []
        """Units that are run at the end of the pass."""
        self._leaking_samples: dict[tuple[str, int], set[Sample]] = {}
        """Samples that leak, by arm and batch size."""
        self._seconds = {True: 0.0, False: 0.0}
        """Seconds of the pass for searches (True) and closed forms (False)."""
        self._results: dict[tuple[str, str, int, int], RoundTables] = {}
        """Best rows so far by arm, title, victim and repeat."""
        self._last_specs: dict[_CallKey, AttackSpec] = {}
        """Settings with which each call was run last."""
        self._answered = False
        """Whether any attack applies."""
        self._calls_without_result: set[_CallKey] = set()
        """Calls that do not apply or failed, which are not repeated."""
        self._failures: dict[str, str] = {}
        """Error messages by attack."""
        self._reported: set[str] = set()
        """Attacks of which it was reported whether they apply."""
        self._never: dict[str, str] = {}
        """Attacks that never apply to the undefended model, with the reason."""
        self._too_slow: set[str] = set()
        """Closed forms that exceeded their share of the time."""
        self._num_missing = 0
        """Number of calls without a result at the end."""
        self._best: dict[str, float] = {}
        """Maximum of the leading metric by arm."""

    def __call__(self, federation: Federation, round: int, keep: runner.Keep) -> RoundTables:
        """Run the stages until the deadline, and return the best rows of each attack; rows are kept after each stage.

        If a value is lost with a machine, the audit continues with the stage that lost it.
        """
        return rerun_until_complete(federation, round, lambda: self._run_stages(federation, round, keep))

    def check_failures(self) -> None:
        """Raise `UserError` if attacks failed and no attack has a result."""
        if self._failures and not self._answered:
            failures = "\n  ".join(f"{attack}: {message}" for attack, message in self._failures.items())
            raise UserError(f"no attack could be run, so there are no results:\n  {failures}")

    @property
    def may_apply(self) -> bool:
        """Return whether an attack applies, or was not run."""
        return self._answered or self._num_missing > 0

    def _run_stages(self, federation: Federation, round: int, keep: runner.Keep) -> RoundTables:
        sent = {arm: federation.ask_server("sent", arm, round).sent for arm in federation.arms}
        queue = plan_stages(self._plan, list(federation.arms), self._evaluations)
        while self._stage_index < len(queue) and not self._deadline.passed:
            stage = queue[self._stage_index]
            following = queue[self._stage_index + 1].evaluations if self._stage_index + 1 < len(queue) else None
            specs = self._specs(stage.evaluations, round)
            try:
                self._run_stage(federation, round, stage, specs, sent)
                if following != stage.evaluations:
                    self._end_pass(federation, round, stage.evaluations, following, specs, sent)
            finally:  # also after Ctrl-C
                keep.write(self._tables(federation, round, specs))
                keep.describe(federation.scenario.model_copy(update={"attacks": list(specs.values())}))
            self._stage_index += 1
        specs = self._specs(next(pass_evaluations(self._evaluations)), round)
        return self._tables(federation, round, specs, complete=True)

    def _end_pass(
        self,
        federation: Federation,
        round: int,
        evaluations: int,
        following: int | None,
        specs: Mapping[str, AttackSpec],
        sent: _Sent,
    ) -> None:
        """Run the postponed units of a pass, closed forms first, and report the pass; `following` is the next one."""
        for searches in (False, True):
            units = [unit for unit in self._postponed_units if bool(unit.method.evaluations) == searches]
            self._run_units(federation, round, Stage(evaluations, units), specs, sent)
        self._postponed_units = []
        if not self._deadline.passed:
            self._progress.pass_done(evaluations, self._seconds, following, self._written_best())
        self._seconds = {True: 0.0, False: 0.0}

    def _specs(self, evaluations: int, round: int) -> dict[str, AttackSpec]:
        """Return the attacks of a pass by title."""
        scenario = _scenario(self._plan, evaluations, self._changes, self._evaluations is not None)
        return {attack.title: attack for attack in scenario.attacked_in(round).attacks}

    def _run_stage(
        self, federation: Federation, round: int, stage: Stage, specs: Mapping[str, AttackSpec], sent: _Sent
    ) -> None:
        """Run a stage until the deadline, without the units that are postponed."""
        postponed = [unit for unit in stage.units if self._all_leaked(unit)]
        self._postponed_units += [unit for unit in postponed if unit not in self._postponed_units]
        units = [unit for unit in stage.units if unit not in postponed]
        self._run_units(federation, round, replace(stage, units=units), specs, sent)

    def _all_leaked(self, unit: Unit) -> bool:
        """Return whether all samples of a defended arm have leaked at a unit's batch size."""
        samples = -(-self._plan.samples // unit.batch) * unit.batch
        return unit.arm != UNDEFENDED and len(self._leaking_samples.get((unit.arm, unit.batch), ())) == samples

    def _run_units(
        self, federation: Federation, round: int, stage: Stage, specs: Mapping[str, AttackSpec], sent: _Sent
    ) -> None:
        """Run the calls of a stage until the deadline, and add their results."""
        began = self._deadline.now()
        calls: list[AttackCall] = []
        for unit in stage.units:
            name = unit.method.name
            if name in self._too_slow or self._never_applies(federation, unit.arm, name):
                continue
            attacks = [specs[title] for title in unit.titles if title in specs]
            calls += federation.attacks.due(round, [federation.attacks.arms[unit.arm]], attacks)
        calls = [d for d in calls if self._needs_run(d)]
        limit = None if stage.searches or self._limit == inf else min(self._limit, self._deadline.left)
        for result in federation.attacks.run_calls(round, calls, sent, self._deadline, limit):
            self._add(result)
        self._seconds[stage.searches] += self._deadline.now() - began

    def _needs_run(self, d: AttackCall) -> bool:
        """Return whether a call may add a result.

        After a lost value, or if the iterations do not change, the call already has its result.
        """
        return _key_of(d) not in self._calls_without_result and self._last_specs.get(_key_of(d)) != d.attack

    def _never_applies(self, federation: Federation, arm: str, attack: str) -> bool:
        """Return whether an attack does not apply to an arm, because it never applies to a model of this form."""
        models = (federation.arms[name].model for name in (UNDEFENDED, arm))
        return attack in self._never and len({repr(model) for model in models}) == 1

    def _add(self, result: CallResult) -> None:
        """Add the results of a call."""
        d, outcomes = result.call, result.outcomes
        if outcomes is None:
            self._too_slow.add(d.attack.name)
            return
        self._last_specs[_key_of(d)] = d.attack
        if all(guess.status in (INAPPLICABLE, "failed") for guess in outcomes):
            self._calls_without_result.add(_key_of(d))
        else:
            self._answered = True
        for guess in outcomes:
            if guess.status == "failed":
                self._failures[d.attack.title] = guess.message
        if d.arm.name == UNDEFENDED and all(guess.inherent for guess in outcomes):
            self._never[d.attack.name] = outcomes[0].message
        self._say_whether_it_applies(d, outcomes)
        for victim, tables in _by_victim(result.tables).items():
            key = d.arm.name, d.attack.title, victim, d.repeat
            if key not in self._results or self._rank(tables) >= self._rank(self._results[key]):
                self._results[key] = tables
            leaked = [get_sample_key(row) for row in tables.attacks if self._criterion.leaks(row)]
            self._leaking_samples.setdefault((d.arm.name, d.attack.batch_size), set()).update(leaked)
            found = [value for row in tables.attacks if (value := self._criterion.nearness(row)) is not None]
            self._best[d.arm.name] = max([self._best.get(d.arm.name, -inf), *found])
        self._progress.best_so_far(self._written_best())

    def _say_whether_it_applies(self, d: AttackCall, outcomes: Sequence[Guess]) -> None:
        """Report once for each attack whether it applies to the undefended model, at the first batch size."""
        if d.arm.name == UNDEFENDED and d.attack.name not in self._reported:
            self._reported.add(d.attack.name)
            message = outcomes[0].message if all(guess.status == INAPPLICABLE for guess in outcomes) else None
            self._progress.say(applies_text(d.attack.name, message))

    def _rank(self, tables: RoundTables) -> tuple[int, float]:
        """Return the number of leaks of one victim, and the mean of the leading metric; larger is better."""
        values = [self._criterion.nearness(row) for row in tables.attacks]
        mean = sum(-inf if value is None else value for value in values) / max(len(values), 1)
        return sum(map(self._criterion.leaks, tables.attacks)), mean

    def _written_best(self) -> dict[str, str]:
        return {arm: self._criterion.written(value) for arm, value in self._best.items() if value > -inf}

    def _tables(
        self, federation: Federation, round: int, specs: Mapping[str, AttackSpec], complete: bool = False
    ) -> RoundTables:
        """Return the best rows so far, and if the audit is `complete`, rows for the attacks without a result."""
        tables = RoundTables()
        self._num_missing = 0
        for d in federation.attacks.due(round, list(federation.attacks.arms.values()), list(specs.values())):
            rest = []
            for victim in d.victims:
                found = self._results.get((d.arm.name, d.attack.title, victim, d.repeat))
                if found is None:
                    rest.append(victim)
                    continue
                for name in _BY_VICTIM:
                    getattr(tables, name).extend(getattr(found, name))
            if rest and complete:
                self._note_missing(tables, federation, round, replace(d, victims=tuple(rest)))
        return tables

    def _note_missing(self, tables: RoundTables, federation: Federation, round: int, d: AttackCall) -> None:
        """Add rows for a call without a result, with the reason."""
        if self._never_applies(federation, d.arm.name, d.attack.name):
            note_not_run(tables, d, round, INAPPLICABLE, self._never[d.attack.name])
        else:
            self._num_missing += 1
            note_not_run(tables, d, round, UNPLAYED, WANT_OF_TIME)


def _key_of(d: AttackCall) -> _CallKey:
    return d.arm.name, d.attack.title, d.victims, d.repeat


def _by_victim(tables: RoundTables) -> dict[int, RoundTables]:
    """Return the rows of a call's reconstructions by victim."""
    found: dict[int, RoundTables] = {}
    for name in _BY_VICTIM:
        rows: list[Row] = getattr(tables, name)
        for row in rows:
            getattr(found.setdefault(row["victim"], RoundTables()), name).append(row)
    return found


def _scenario(plan: Plan, evaluations: int, changes: Sequence[str], fixed: bool) -> Scenario:
    """Return the scenario of one pass. Its error messages have no line numbers, because there is no file."""
    document = scenarios.with_changes(
        load_yaml(plan.scenario_text(pass_iterations(plan, evaluations, fixed))), list(changes)
    )
    scenarios.find_inputs(document, [Path.cwd()])
    return scenarios.check_scenario(document, "the audit (arms: --defence; other fields: --set PATH=VALUE)")


def _inspect(plan: Plan, changes: Sequence[str], progress: AuditProgress, shrink: bool) -> tuple[Plan, Inputs] | None:
    """Describe data and model, and return the plan with the batch sizes that both allow.

    Returns None if no attack takes samples of this kind. Unless `shrink` is true, raises `UserError` for a batch size
    that exceeds the clients' samples or that the model rejects.
    """
    say = progress.say
    loaded = _scenario(plan, 1, changes, fixed=True)
    data = loaded.data.load()
    largest = max(len(data.train_labels) // loaded.federation.clients, 1)
    if not shrink and largest < max(plan.batches):
        raise UserError(
            f"--batch {max(plan.batches)}: each of {plan.samples} clients (--images) has at most {largest} samples; "
            "use smaller batches, fewer images, or more data"
        )
    if largest < max(plan.batches):
        plan = replace(plan, batches=sorted({min(size, largest) for size in plan.batches}))
        fitting, usual = (",".join(map(str, sizes)) for sizes in (plan.batches, BATCHES))
        say(f"--batch {fitting} instead of {usual}: each of {plan.samples} clients (--images) has too few samples")
        loaded = _scenario(plan, 1, changes, fixed=True)
    if not loaded.attacks:
        say(f"attacks: no attack of the audit supports {plan.modality}")
        return None
    inputs = prepare_inputs(loaded, data=data)
    if refused := _refused_batches(inputs):
        plan = _without_refused(plan, refused, say, shrink)
        inputs = prepare_inputs(_scenario(plan, 1, changes, fixed=True), data=data)
    for message in inputs.remarks:
        progress.note(message)
    given = {"name": loaded.data.name, **loaded.data.model_dump(mode="json", exclude_defaults=True)}
    say(f"data {name_pipeline([given])}: {data.described}")
    say(f"model {loaded.model.title}, loss {loaded.loss.name}:")
    for line in described(inputs.accounts[0].arm.model, data.sample):
        say(f"  {line}")
    return plan, inputs


def _refused_batches(inputs: Inputs) -> dict[int, ClientError]:
    """Return the batch sizes for which the undefended model gives no gradient, each with the client's error.

    Larger batches than one whose gradient takes long are not checked; the attacks' rows then have the error.
    """
    arm = next(account.arm for account in inputs.accounts if account.name == UNDEFENDED)
    sent = Sent(0, arm.weights, arm.buffers)
    first = {attack.batch_size: attack for attack in reversed(inputs.scenario.attacks)}
    found = {}
    with local(inputs, Progress()) as executor:
        for size, attack in sorted(first.items()):
            [victim, *_] = rounds.victims(inputs.scenario, attack, 0, inputs.parts.sizes)
            call = Call("observe", (sent, ObservationRequest(UNDEFENDED, [victim], attack)), returns=3)
            began = monotonic()
            try:
                list(executor.run_clients([call]))
            except ClientError as error:
                found[size] = error
            except Exception:  # such as too little memory
                continue
            if monotonic() - began > _SLOW:
                break
    return found


def _without_refused(plan: Plan, refused: Mapping[int, ClientError], say: Callable[[str], None], shrink: bool) -> Plan:
    """Return the plan without the batch sizes that the model rejects (`refused`: batch size -> error).

    Raises `UserError` if the user requested them (not `shrink`), or if the model rejects all.
    """
    able, sizes = [size for size in plan.batches if size not in refused], ",".join(map(str, refused))
    error = next(iter(refused.values()))
    said = _refusal(error, plan, sizes)
    if not able:
        raise UserError(said) from error
    if not shrink:
        raise UserError(f"--batch: remove {sizes}, because the model rejects this batch size: {said}")
    say(f"--batch {','.join(map(str, able))}: without {sizes}, because the model rejects this batch size: {said}")
    return replace(plan, batches=able)


def _refusal(error: ClientError, plan: Plan, sizes: str) -> str:
    """Return why a model rejects batches of these sizes, with a fix if batch norm is the reason."""
    said = str(error).partition("\n")[0]
    if _ONE_VALUE not in said:
        return said
    larger = ", a larger --size" if plan.modality == "pixels" else ""
    return (
        f"batch norm in training mode needs more than one value per channel, and a batch of {sizes} has only one. Use "
        f"larger batches (--batch 4){larger}, or batch norm in evaluation mode (--set model.batch_norm=eval)"
    )
