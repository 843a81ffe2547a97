"""Evidence statement on a run, section by section: evidence for a supervisory authority or an impact assessment.

All figures come from the functions of the report. The statement depends only on the contents of the folder, so the same
folder gives the same statement.

The sections follow the EDPB Opinion 28/2024 on AI models (anonymity: likelihood of extraction, likelihood of obtaining
personal data by queries, all the means reasonably likely to be used) and the GDPR, article 35(7)(a) to (d) (contents of
an impact assessment).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from rayfed import registry
from rayfed.core.reasons import Reason
from rayfed.evidence.arms import component_text
from rayfed.evidence.attack_results import (
    InferenceResult,
    Leakage,
    attack_input,
)
from rayfed.evidence.proved_bounds import attacks_without_bound, closest_comparisons, compare_bounds
from rayfed.evidence.rows import Row, knowledge_in
from rayfed.evidence.verdicts import find_closest
from rayfed.metrics import roc
from rayfed.metrics.known import METRICS
from rayfed.metrics.top import TOP, chance
from rayfed.report.html.page import flatten_settings, optional_document
from rayfed.report.html.pictures import picture_key
from rayfed.report.html.run_data import RunData
from rayfed.report.samples import Samples
from rayfed.report.statement.about import FILE as ABOUT
from rayfed.report.statement.about import QUESTIONS
from rayfed.report.text.attacks import attack_input_text
from rayfed.report.text.findings import PARTS
from rayfed.report.text.formats import (
    NONE,
    format_bytes,
    format_duration,
    format_points,
    format_share,
    format_similarity,
)
from rayfed.report.text.guarantees import guarantee_sentences
from rayfed.report.text.leakage import verdict_reasons_text
from rayfed.report.text.membership import AUC_LEGEND, IDENTIFICATIONS, auc_text, unknown_rates_text
from rayfed.report.text.proved_bounds import BOUNDS, bound_rows, comparison_text, uncovered_text
from rayfed.report.text.reasons import REASONS, attack_text
from rayfed.report.text.samples import samples_warning
from rayfed.report.text.summary import best_reconstruction
from rayfed.report.text.verdict_table import VerdictTable, verdict_table
from rayfed.report.text.weights import attacked_weights
from rayfed.store import exits
from rayfed.store.finding import Finding, State
from rayfed.store.folder import SCENARIO, RunFolder
from rayfed.store.schemas import ANSWERED, TABLES

ENVIRONMENT = "environment.json"
NOT_ADVICE = (
    "This statement is evidence for an assessment, not legal advice. The controller and the authority decide whether a "
    "model is anonymous, and whether a risk is acceptable. Stronger or other attacks may recover more."
)
_EXTRACTION = "EDPB Opinion 28/2024: likelihood of extracting personal data"
_QUERIES = "EDPB Opinion 28/2024: likelihood of obtaining personal data by queries"
_MEANS = "EDPB Opinion 28/2024: all the means reasonably likely to be used"
_NO_RECONSTRUCTION = f"NOT MEASURED: {REASONS[Reason.NO_RECONSTRUCTION_ATTACK]}."
_BOUNDS = (
    "Upper bounds, whatever the attack. Reconstruction robustness (ReRo): an attacker guesses a secret of a unit with "
    "this prior probability before training, and succeeds with at most the probability in the table after training. "
    "Membership inference: true positive rate (TPR) at a false positive rate (FPR), and their maximum difference."
)
"""Legend of the table of bounds."""
_PLACES = ("command", "search_path", "earlier", "hashes")
"""Entries of environment.json with paths of the machine, or that another section shows."""


@dataclass(frozen=True)
class StatementTable:
    """Table of text in a statement."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_hashes: bool = False


@dataclass(frozen=True)
class StatementPicture:
    """Sample and reconstruction in a statement: images as `data:` URLs, or words. `true` is None if not shown."""

    true: str | None
    reconstructed: str
    caption: str
    is_image: bool


Block = str | list[str] | StatementTable | StatementPicture
"""A paragraph, a list of points, a table, or a sample."""


@dataclass(frozen=True)
class StatementSection:
    """Section of a statement, with the legal question that the section addresses."""

    title: str
    blocks: Sequence[Block]
    answers: str = ""


@dataclass(frozen=True)
class Statement:
    """Evidence statement on one run."""

    folder: RunFolder
    """The run, or a copy without clients' data if `redacted`."""
    about: Mapping[str, str]
    """The user's entries by key of `QUESTIONS`."""
    original: RunFolder
    """The run itself, whose hashes are printed."""
    redacted: bool = False

    @property
    def title(self) -> str:
        """Return the title of the statement: the name of the scenario."""
        return str(self._data.scenario.get("name", "run"))

    @property
    def lead(self) -> list[str]:
        """Return the paragraphs before the sections."""
        started = optional_document(self.original, ENVIRONMENT).get("started")
        state = self._data.state
        sentences = [f"Run started: {started}."] if started else []
        if state != "finished":
            end = "was stopped after its last round" if exits.is_complete(self._data.status) else "did not finish"
            sentences.append(f"The run {end} ({state}).")
        if self.redacted:
            sentences.append("This version leaves out samples, labels, messages and file names.")
        return [" ".join([*sentences, NOT_ADVICE]), *filter(None, [self._warning])]

    @property
    def sections(self) -> list[StatementSection]:
        """Return all sections in the order of the statement."""
        return [
            StatementSection("Verdict", self._verdict),
            StatementSection("System and data", self._system, "GDPR art. 35(7)(a): description and purposes"),
            StatementSection(
                "Necessity and cost", self._necessity, "GDPR art. 35(7)(b): necessity and proportionality"
            ),
            StatementSection("Attackers", self._attackers, _MEANS),
            StatementSection("Attacks and budgets", [self._budgets], _MEANS),
            StatementSection("Reconstructions", self._recovered, f"{_EXTRACTION}; GDPR art. 35(7)(c): risks"),
            StatementSection("Inference", self._inferred, f"{_QUERIES}; GDPR art. 35(7)(c): risks"),
            StatementSection("Protective measures and proved bounds", self._measures, "GDPR art. 35(7)(d): measures"),
            StatementSection("Not measured", [self._unmeasured]),
            StatementSection("Environment", [self._environment]),
            StatementSection("Hashes", self._hashes),
        ]

    @cached_property
    def _data(self) -> RunData:
        return RunData(self.folder)

    @cached_property
    def _specs(self) -> dict[str, Mapping[str, Any]]:
        """The scenario's entry for each attack, by its title."""
        written = ({"name": one} if isinstance(one, str) else one for one in self._data.scenario.get("attacks") or [])
        return {str(one.get("label") or one["name"]): one for one in written}

    @cached_property
    def _samples(self) -> Samples:
        return Samples("none", public=False) if self.redacted else self._data.samples

    @property
    def _warning(self) -> str | None:
        if self._samples.warning is None or not any(isinstance(block, StatementPicture) for block in self._worst):
            return None
        return samples_warning(self._samples.mode, "statement")

    @cached_property
    def _table(self) -> VerdictTable:
        data = self._data
        return verdict_table(data.evidence, data.arms, data.privacy, data.weights)

    @property
    def _verdict(self) -> list[Block]:
        if not self._data.evidence.verdicts:
            return ["NOT MEASURED: no attack was run."]
        table = self._table
        blocks: list[Block] = [
            table.title,
            StatementTable(["Arm", *table.headings], [[row.arm, *row.cells] for row in table.rows]),
            list(table.reasons),
            *table.legend,
        ]
        return [block for block in blocks if block]

    def _entries(self, *keys: str) -> StatementTable:
        rows = [[QUESTIONS[key], self.about.get(key, f"NOT GIVEN ({key}, in the file of --about)")] for key in keys]
        return StatementTable(["Question", "Operator's entry"], rows)

    @property
    def _system(self) -> list[Block]:
        entries = self._entries("system", "controller", "purposes", "data", "people", "access")
        return [
            entries,
            "Settings of the run, from its scenario:",
            StatementTable(["Part", "Setting"], list(self._settings())),
        ]

    def _settings(self) -> Iterator[tuple[str, str]]:
        scenario = self._data.scenario
        data, model, training = (_named(scenario.get(part)) for part in ("data", "model", "training"))
        mix = self._data.mix
        split = f", {mix.counts.sum():,} samples at {len(mix.clients)} clients" if mix else ""
        yield "Data", f"{data['name'] or 'digits'}{split}"
        yield "Model", f"{model['name'] or 'not named'}, loss {_named(scenario.get('loss'))['name'] or 'cross_entropy'}"
        yield "Weights", attacked_weights(scenario, self._data.status, self._every)
        if rounds := max((arm.rounds for arm in self._data.arms), default=0):
            planned = self._data.status.get("rounds")
            settings = ", ".join(
                f"{name.replace('_', ' ')} {training[name]}"
                for name in ("algorithm", "epochs", "steps", "batch_size", "lr", "momentum")
                if training.get(name) is not None
            )
            yield "Training", f"{rounds} of {planned or rounds} rounds" + (f"; {settings}" if settings else "")
        else:
            yield "Training", "none: one exchange of updates was attacked"
        yield "Attacked rounds", ", ".join(map(str, sorted({row["round"] + 1 for row in self._every}))) or "none"
        yield "Attacked clients", str(len({row["victim"] for row in self._every}))

    @property
    def _every(self) -> list[Row]:
        return [*self._data.attacks, *self._data.inferences]

    @property
    def _necessity(self) -> list[Block]:
        if not self._data.trained:
            return [self._entries("necessity"), "Nothing was trained, so the cost of the measures was not measured."]
        rows = [
            [
                arm.name,
                format_share(arm.accuracy),
                NONE if arm.accuracy_change is None else f"{format_points(arm.accuracy_change)} points",
                format_duration(arm.actor_seconds.mean if arm.actor_seconds else None),
                format_bytes(arm.bytes_up / arm.rounds if arm.rounds and arm.bytes_up else None),
            ]
            for arm in self._data.arms
        ]
        change = f"Change from {self._data.arms[0].name}"
        headings = ["Arm", "Test accuracy", change, "Training time per round", "Upload per round"]
        blocks: list[Block] = [self._entries("necessity"), StatementTable(headings, rows)]
        if len(self._data.arms) > 1:
            blocks.append("Each arm was trained once. Repeat the run to separate differences from chance.")
        return blocks

    @property
    def _attackers(self) -> list[Block]:
        groups: dict[tuple[Any, Any], list[Row]] = {}
        for row in self._answered:
            given = row if "observes" in row else {**row, **self._given(row)}
            groups.setdefault((given["observes"], knowledge_in(given)), []).append(given)
        tested = [
            [
                attack_input_text(attack_input(rows)),
                ", ".join(dict.fromkeys(self._component(row["attack"]) for row in rows)),
            ]
            for rows in groups.values()
        ]
        return [
            StatementTable(["Tested: attacker with", "Attacks"], tested or [["nothing was tested", ""]]),
            "Not tested:",
            list(self._untested()),
        ]

    @cached_property
    def _answered(self) -> list[Row]:
        """Rows of attacks that have a result."""
        return [row for row in self._every if row["status"] in ANSWERED]

    def _given(self, row: Row) -> dict[str, Any]:
        """Return the inputs of an attack whose rows do not have them, because it reconstructs nothing."""
        spec = self._specs.get(row["attack"], {})
        return {"observes": spec.get("observes"), "knowledge": spec.get("knowledge"), "batch_size": None}

    def _component(self, title: str) -> str:
        return str(self._specs.get(title, {}).get("name", title))

    def _untested(self) -> Iterator[str]:
        """Yield the attackers that this run did not test."""
        given = [{**self._given(row), **row} for row in self._answered]
        views = {row["observes"] for row in given}
        granted: set[str] = set()
        for row in given:
            granted.update(row["knowledge"] or ())
        for view in registry.table("views"):
            if view not in views:
                yield f"an attacker that observes {registry.find('views', view).describe}"
        more = [registry.find("grants", name).describe for name in registry.table("grants") if name not in granted]
        if more:
            yield f"an attacker that is also given: {', '.join(more)}"
        yield from _untested_attacks([self._specs.get(title, {}) for title in {row["attack"] for row in given}])

    @property
    def _budgets(self) -> Block:
        grouped: dict[str, list[Leakage]] = {}
        for leak in self._data.leaks:
            grouped.setdefault(self._component(leak.attack), []).append(leak)
        rows = [self._budget(name, leaks) for name, leaks in grouped.items()]
        for claim in self._data.claims:
            row = [self._component(claim.attack), self._version, NONE, NONE, NONE]
            if row not in rows:
                rows.append(row)
        headings = ["Attack", "Version", "Iterations per search", "Reconstructions", "Total time"]
        return StatementTable(headings, rows) if rows else "No attack was run."

    def _budget(self, name: str, leaks: Sequence[Leakage]) -> list[str]:
        searched = [leak.iterations for leak in leaks if leak.iterations and leak.iterations.high]
        low = min((spread.low for spread in searched), default=0.0)
        high = max((spread.high for spread in searched), default=0.0)
        iterations = "closed form" if not searched else f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
        seconds = sum(leak.seconds.mean * leak.seconds.n for leak in leaks if leak.seconds)
        return [name, self._version, iterations, f"{sum(leak.images for leak in leaks):,}", format_duration(seconds)]

    @cached_property
    def _version(self) -> str:
        version = optional_document(self.original, ENVIRONMENT).get("rayfed")
        return f"rayfed {version}" if version else "not recorded"

    @property
    def _recovered(self) -> list[Block]:
        rows = [self._rate(finding) for finding in self._data.evidence.findings]
        noun = self._data.evidence.criterion.noun
        if not rows:
            return [_NO_RECONSTRUCTION]
        headings = ["Arm", "Batch size", f"{noun.capitalize()}s reconstructed", "Rate", "95 % interval", "Attack"]
        recognised = [
            f"{leak.arm}, {leak.attack}, {METRICS[name].title}: {self._exact(leak, name)}, chance "
            f"{format_share(chance(name, leak.people))}{self._no_evidence(leak.arm)}"
            for leak in self._data.leaks
            for name in TOP
            if leak.scores[name] and leak.people
        ]
        return [
            StatementTable(headings, rows),
            f"The rate counts each {noun} once if any attack on it is a leak as defined above. Intervals are exact "
            "(Clopper and Pearson) for independent samples. Samples of one update are not independent. A rate of 0 % "
            "means only that these attacks reconstructed none of the attacked samples.",
            *([recognised] if recognised else []),
            *self._worst,
        ]

    def _rate(self, finding: Finding) -> list[str]:
        cells = [finding.arm, str(finding.batch)]
        if finding.state not in (State.LEAKS, State.NOT_RECONSTRUCTED):
            return [*cells, NONE, finding.state.upper(), NONE, NONE]
        if (part := finding.part) and not finding.leaked:
            samples = f"0 of {finding.samples}, {part.samples} in part"
            rate = f"{format_share(part.recovered)} of the {PARTS[self._data.evidence.criterion.modality]}"
            return [*cells, samples, rate, NONE, attack_text(finding.part_by)]
        leaked = roc.share(finding.leaked, finding.samples)
        interval = f"{format_share(leaked.low)} to {format_share(leaked.high)}"
        by = attack_text(finding.by) if finding.leaked else NONE
        return [*cells, f"{finding.leaked} of {finding.samples}", format_share(leaked.value), interval, by]

    def _no_evidence(self, arm: str) -> str:
        """Return a warning that a low figure is no evidence, if the arm is inconclusive or not measured."""
        verdict = next(one for one in self._data.evidence.verdicts if one.arm == arm)
        return "" if verdict.answered else f" (no evidence of protection: {arm} is {verdict.state})"

    def _exact(self, leak: Leakage, name: str) -> str:
        spread = leak.scores[name]
        assert spread is not None
        hits = round(spread.mean * spread.n)
        found = roc.share(hits, spread.n)
        interval = f"{format_share(found.low)} to {format_share(found.high)}"
        return f"{hits} of {spread.n}, {format_share(found.value)} (95 % interval {interval})"

    @cached_property
    def _worst(self) -> list[Block]:
        """The best reconstruction: a sentence, the sample if samples are shown, and its hashes."""
        criterion = self._data.evidence.criterion
        row = find_closest(self._data.attacks, criterion)
        if row is None:
            return ["NOT MEASURED: no attack returned a reconstruction with a score."]
        mix = self._data.mix
        classes = mix.classes if mix and self._samples.truth else None
        entries = best_reconstruction(row, criterion, f"under arm {row['arm']}", classes)
        blocks: list[Block] = [f"{one.heading}: {' '.join(one.lines)}" for one in entries]
        return [*blocks, *self._shown(row)]

    def _shown(self, row: Row) -> Iterator[Block]:
        """Yield the sample of a row, if samples are shown, and its hashes."""
        for table, is_image in (("images", True), ("texts", False)):
            found = next(
                (one for one in self.original.read_table(table).to_pylist() if picture_key(one) == picture_key(row)),
                None,
            )
            if found is None:
                continue
            samples = self._samples
            if samples.any and is_image:
                true, rebuilt = samples.true_image(found["true"]), samples.image(found["reconstructed"])
                yield StatementPicture(true, rebuilt, format_similarity(row), is_image=True)
            elif samples.any:
                true_words = samples.true_words(found["true"])
                original = None if true_words is None else " ".join(true_words)
                yield StatementPicture(
                    original, " ".join(samples.words(found["reconstructed"])), format_similarity(row), is_image=False
                )
            if not is_image and not samples.truth:
                yield "The hash is left out, because a text or a row can be found from its hash by trying values."
                continue
            kind = "PNG" if is_image else "one word per line"
            hashes = {name: _hash_sample(found[name], is_image) for name in ("true", "reconstructed")}
            listed = ", ".join(f"{name} {digest}" for name, digest in hashes.items())
            yield f"SHA-256 ({kind}), to recognise the sample: {listed}"

    @property
    def _inferred(self) -> list[Block]:
        missing = {
            "auc": "membership inference",
            "accuracy": "attribute or property inference",
            "class_share": "model inversion by a generator (samples of a class)",
        }
        rows = [row for claim in self._data.claims for row in _inference_rows(claim)]
        measured = {claim.metric for claim in self._data.claims if claim.value}
        unmeasured = [f"NOT MEASURED: {what}" for metric, what in missing.items() if metric not in measured]
        unmeasured.append(
            "NOT MEASURED: queries to the finished model (regurgitation, exfiltration, inversion of its outputs). "
            "rayfed attacks the exchange of a training. A model that is published or queried needs its own tests."
        )
        few = dict.fromkeys(text for claim in self._data.claims if claim.roc for text in unknown_rates_text(claim.roc))
        headings = ["Arm", "Attack", "Measure", "Value (95 % interval)", "Chance", "Control", "Result"]
        blocks: list[Block] = [StatementTable(headings, rows), AUC_LEGEND] if rows else []
        return [*blocks, [*few, *unmeasured]]

    @property
    def _measures(self) -> list[Block]:
        arms = [[arm.name, " → ".join(map(component_text, arm.components)) or "none"] for arm in self._data.arms]
        blocks: list[Block] = [self._entries("measures"), StatementTable(["Arm", "Defences"], arms)]
        proved, attacks, inferences = self._data.proved, self._data.attacks, self._data.inferences
        images = self._data.evidence.criterion.modality == "pixels"
        trained = self._data.trained
        blocks.append(guarantee_sentences(self._data.privacy, self._data.secure, images, trained))
        none = [f"{row['arm']}: {row['note']}" for row in self._data.privacy if row["note"] and not row["defence"]]
        if none:
            blocks.append(none)
        beside = [comparison_text(one) for one in closest_comparisons(compare_bounds(proved, attacks, inferences))]
        uncovered = uncovered_text(attacks_without_bound(self._data.privacy, proved, attacks, inferences))
        if bounds := bound_rows(self._data.privacy):
            blocks += [StatementTable(["Arm", "Defence", "Unit", *BOUNDS], bounds), _BOUNDS]
        if beside:
            blocks += ["Measurements closest to their proved bounds:", beside]
        return [*blocks, uncovered] if uncovered else blocks

    @property
    def _unmeasured(self) -> Block:
        found = []
        for cell in self._data.evidence.findings:
            if cell.state in (State.NOT_MEASURED, State.INCONCLUSIVE, State.NOTHING_TO_ATTACK) or cell.not_run:
                reasons = verdict_reasons_text(cell, self._data.evidence.criterion)
                if not (cell.doubt or cell.not_run or cell.no_results or cell.unfinished):
                    reasons.insert(0, REASONS[Reason.NOTHING_LEAKS_UNDEFENDED])
                why = "; ".join(reasons)
                found.append(f"{cell.arm}, batch size {cell.batch}: {cell.state}: {why}")
        silent: dict[tuple[str, str, str], dict[str, int]] = {}
        guesses: list[Leakage | InferenceResult] = [*self._data.leaks, *self._data.claims]
        for one in guesses:
            for (status, message), count in one.failures.items():
                arms = silent.setdefault((self._component(one.attack), status, message), {})
                arms[one.arm] = arms.get(one.arm, 0) + count
        for (attack, status, message), arms in silent.items():
            where = ", ".join(f"{arm} ({count})" for arm, count in arms.items())
            found.append(f"{attack}: {status} on updates of {where}" + (f": {message}" if message else ""))
        if not self._data.attacks:
            found.append(f"reconstruction: {REASONS[Reason.NO_RECONSTRUCTION_ATTACK]}")
        seed = self._data.scenario.get("seed")
        found.append(f"seeds other than {seed}: one run does not show the spread over seeds")
        found.append("other clients, rounds and data")
        return list(dict.fromkeys(found))

    @property
    def _environment(self) -> Block:
        document = optional_document(self.folder, ENVIRONMENT)
        if not document:
            return "Left out." if self.redacted else "The run did not record its environment."
        kept = {name: value for name, value in document.items() if name not in _PLACES}
        return "; ".join(f"{name} {value}" for name, value in flatten_settings(kept)) + "."

    @property
    def _hashes(self) -> list[Block]:
        last = optional_document(self.original, ENVIRONMENT)
        sessions = [one.get("hashes") or {} for one in [*last.get("earlier", []), last]]
        recorded = sessions[-1] | {"weights": sessions[0].get("weights")}
        rows = []
        for part, title in (("code", "Code"), ("data", "Data"), ("weights", "Weights at the start")):
            hashes = recorded.get(part) or {}
            for place, (name, digest) in enumerate(hashes.items()):
                rows.append([f"{title}: {self._name(part, name, place)}", str(digest)])
            if part != "weights":  # weights differ at each resume
                rows += self._before(part, title, hashes, sessions)
            if not hashes:
                rows.append([title, "not recorded by this run"])
        for name in (SCENARIO, ENVIRONMENT, ABOUT):
            if self.original.exists(name):
                rows.append([name, sha256(self.original.read_bytes(name)).hexdigest()])
        rows += [[f"Table {table}", digest] for table in TABLES if (digest := _hash_table(self.original, table))]
        return [
            StatementTable(["Item", "SHA-256"], rows, has_hashes=True),
            "The hash of a table is that of the output of “sha256sum TABLE/*.parquet” in the run's folder. To make "
            f"this statement again from the folder: “rayfed statement RUN{' --redact' if self.redacted else ''}”.",
        ]

    def _before(self, part: str, title: str, now: Row, sessions: Sequence[Row]) -> list[list[str]]:
        """Return the hashes of a part in sessions before the last resume, if they differ."""
        rows: dict[tuple[str, str], None] = {}
        for session in sessions:
            for name, one in (session.get(part) or {}).items():
                if one != now.get(name):
                    place = list(now).index(name) if name in now else len(now)
                    rows[f"{title}: {self._name(part, name, place)}, before a resume", str(one)] = None
        return [list(row) for row in rows]

    def _name(self, part: str, name: str, place: int) -> str:
        """Return the name of a hashed item; in a redacted statement, user modules have a number."""
        return f"module {place}" if self.redacted and part == "code" and name != "rayfed" else name


def _untested_attacks(specs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the kinds of attackers that none of the scenario's entries for attacks has."""
    names = {spec.get("name") for spec in specs}
    if not any(spec.get("earlier") or (spec.get("averages") or 1) > 1 for spec in specs):
        yield "an attacker that combines updates of several rounds, or repeated updates"
    if not names & {"imprint", "peftleak"}:
        yield "a malicious server that sends modified weights or layers to increase the leakage"
    if "gan" not in names:
        yield "a malicious client that trains a generator on the models that it receives"
    yield "an attacker that has only the finished model, or queries it (rayfed attacks the updates of a training)"


def _inference_rows(claim: InferenceResult) -> Iterator[list[str]]:
    """Yield the rows of the table of inferences for one attack on one arm: its AUC and TPRs, or its mean."""
    if found := claim.roc:
        members = f"AUC, {found.members} members, {found.non_members} non-members"
        control = auc_text(found.control) if found.control else NONE
        yield [
            claim.arm,
            claim.attack,
            members,
            auc_text(found.auc),
            "0.5",
            control,
            IDENTIFICATIONS[found.identification],
        ]
        for rate, tpr in found.true_positives.items():
            if tpr is not None:
                value = f"{format_share(tpr.value)} ({format_share(tpr.low)} to {format_share(tpr.high)})"
                yield [claim.arm, claim.attack, f"TPR at {100 * rate:g} % FPR", value, f"{100 * rate:g} %", NONE, ""]
    elif claim.value and claim.chance:
        metric = claim.metric.replace("_", " ")
        yield [claim.arm, claim.attack, metric, f"{claim.value.mean:.2f}", f"{claim.chance.mean:.2f}", NONE, ""]
    else:
        yield [claim.arm, claim.attack, claim.metric.replace("_", " "), "NOT MEASURED", NONE, NONE, "no result"]


def _hash_table(folder: RunFolder, table: str) -> str | None:
    """Return the hash over the valid parts of a table; None without parts."""
    lines = [f"{sha256(folder.read_bytes(name)).hexdigest()}  {name}\n" for name in folder.parts(table)]
    return sha256("".join(lines).encode()).hexdigest() if lines else None


def _hash_sample(sample: Any, is_image: bool) -> str:
    """Return the SHA-256 of an image's bytes, or of words, one per line."""
    return sha256(sample if is_image else "\n".join(sample).encode()).hexdigest()


def _named(part: Any) -> dict[str, Any]:
    """Return a section of a scenario as a mapping with a `name`, which may be None."""
    return {"name": None, **part} if isinstance(part, Mapping) else {"name": part}
