"""Statement on a run, section by section: for a file, a supervisory authority, an impact assessment.

The report's code computes every figure. Nothing depends on the clock, on the folder's place or on anything outside it,
so the same folder gives the same statement.

The questions are those of the EDPB, Opinion 28/2024 on certain data protection aspects related to the processing of
personal data in the context of AI models (anonymity: the likelihood of extraction, and of obtaining personal data by
queries, with all the means reasonably likely to be used), and of the GDPR, article 35(7)(a) to (d) (what an impact
assessment contains).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from rayfed import registry
from rayfed.analysis import summary
from rayfed.analysis.audit import PARTS, Finding
from rayfed.analysis.formats import duration, near, share
from rayfed.analysis.membership import area, in_words, stated
from rayfed.analysis.proved import comparisons, nearest_to_bounds, uncovered
from rayfed.analysis.summary import Claim, Leak, Row
from rayfed.analysis.verdicts import Verdict, attackers, closest, criterion_of, guess, rates, run_findings, verdicts
from rayfed.metrics import roc
from rayfed.metrics.known import METRICS
from rayfed.metrics.top import TOP, chance
from rayfed.report import words
from rayfed.report.about import FILE as ABOUT
from rayfed.report.about import QUESTIONS
from rayfed.report.page import flat, optional_document
from rayfed.report.pictures import key
from rayfed.report.provenance import attacked_weights
from rayfed.report.samples import Samples, shown
from rayfed.store import exits
from rayfed.store.folder import SCENARIO, RunFolder
from rayfed.store.schemas import ANSWERED, TABLES

ENVIRONMENT = "environment.json"
NOT_ADVICE = (
    "This is evidence for an assessment, and no legal advice: the controller and the authority decide whether a model "
    "is anonymous, and whether a risk is acceptable. A stronger attack, or one that was not tried, may get more."
)
_EXTRACTION = "EDPB Opinion 28/2024: likelihood of extracting personal data"
_QUERIES = "EDPB Opinion 28/2024: likelihood of obtaining personal data by queries"
_MEANS = "EDPB Opinion 28/2024: all the means reasonably likely to be used"
_PLACES = ("command", "search_path", "earlier", "hashes")
"""Entries of environment.json that name places on the machine, or that another section shows."""


@dataclass(frozen=True)
class Table:
    """A table of text."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A sample: images as `data:` URLs, or words; the true one is None if it is not shown."""

    true: str | None
    reconstructed: str
    caption: str
    is_image: bool


Block = str | list[str] | Table | Picture
"""A paragraph, a list of points, a table, or a sample."""


@dataclass(frozen=True)
class Section:
    """A section, and the question of the law or of an authority that it is about."""

    title: str
    blocks: Sequence[Block]
    answers: str = ""


@dataclass(frozen=True)
class Statement:
    """A statement on one run."""

    folder: RunFolder
    """The run; if `redacted`, a copy without clients' data."""
    about: Mapping[str, str]
    """The user's answers, by key of `QUESTIONS`."""
    original: RunFolder
    """The run itself, whose hashes are printed."""
    redacted: bool = False

    @property
    def title(self) -> str:
        """Name of the run's scenario."""
        return str(self._scenario.get("name", "run"))

    @property
    def lead(self) -> list[str]:
        """Paragraphs before all sections."""
        status = exits.status(self.folder)
        started = optional_document(self.original, ENVIRONMENT).get("started")
        played = f"Played {started}. " if started else ""
        over, state = "", status.get("state", "unknown")
        if state != "finished":
            how = "was stopped after its last round" if self._finished else "did not come to its end"
            over = f"The run {how} ({state}). "
        left_out = "Samples, labels, messages and file names are left out. " if self.redacted else ""
        return [f"{played}{over}{left_out}{NOT_ADVICE}", *filter(None, [self._warning])]

    @property
    def sections(self) -> list[Section]:
        """All sections, in their order."""
        return [
            Section("Verdict", self._verdict),
            Section("The system and its data", self._system, "GDPR art. 35(7)(a): description and purposes"),
            Section("Necessity and price", self._necessity, "GDPR art. 35(7)(b): necessity and proportionality"),
            Section("Attackers, tested and not", self._attackers, _MEANS),
            Section("Attacks and their budgets", [self._budgets], _MEANS),
            Section("What attacks recovered", self._recovered, f"{_EXTRACTION}; GDPR art. 35(7)(c): risks"),
            Section("What else was inferred", self._inferred, f"{_QUERIES}; GDPR art. 35(7)(c): risks"),
            Section("Measures, and what is proved of them", self._measures, "GDPR art. 35(7)(d): measures"),
            Section("Not measured, and why", [self._unmeasured]),
            Section("Environment", [self._environment]),
            Section("Hashes", self._hashes),
        ]

    @cached_property
    def _scenario(self) -> dict[str, Any]:
        return self.folder.scenario()

    @cached_property
    def _attacks(self) -> list[Row]:
        return self._rows("attacks")

    @cached_property
    def _inferences(self) -> list[Row]:
        return self._rows("inferences")

    @cached_property
    def _privacy(self) -> list[Row]:
        return self._rows("privacy")

    def _rows(self, table: str) -> list[Row]:
        found: list[Row] = self.folder.read_table(table).to_pylist()
        return found

    @cached_property
    def _finished(self) -> bool:
        return exits.over(exits.status(self.folder))

    @cached_property
    def _arms(self) -> list[summary.ArmSummary]:
        rounds, clients = self._rows("rounds"), self._rows("clients")
        names = summary.arm_names(self._scenario, rounds, self._attacks, self._inferences)
        return summary.arms(names, self._scenario, rounds, clients)

    @cached_property
    def _leaks(self) -> list[Leak]:
        return summary.leaks(self._attacks, [arm.name for arm in self._arms], {})

    @cached_property
    def _claims(self) -> list[Claim]:
        return summary.claims(self._inferences, [arm.name for arm in self._arms])

    @cached_property
    def _findings(self) -> list[Finding]:
        return run_findings(self._scenario, self._attacks, self._finished)

    @cached_property
    def _specs(self) -> dict[str, Mapping[str, Any]]:
        """The scenario's entry for each attack, by its title."""
        written = ({"name": one} if isinstance(one, str) else one for one in self._scenario.get("attacks") or [])
        return {str(one.get("label") or one["name"]): one for one in written}

    @cached_property
    def _samples(self) -> Samples:
        return Samples("none", public=False) if self.redacted else shown([self._scenario])

    @property
    def _warning(self) -> str | None:
        if self._samples.warning is None or not any(isinstance(block, Picture) for block in self._worst):
            return None
        return (
            "This statement shows a client's sample, or a reconstruction of it, and the data are not known to be "
            "public. Before you pass it on, make one without samples by rayfed statement RUN --redact."
        )

    @cached_property
    def _verdicts(self) -> list[Verdict]:
        return verdicts(self._scenario, self._attacks, self._inferences, self._finished)

    @property
    def _verdict(self) -> list[Block]:
        criterion = criterion_of(self._scenario, self._attacks)
        told = attackers(self._verdicts), rates(self._verdicts), guess(self._scenario, self._attacks)
        legend = " ".join(filter(None, told))
        return [
            [verdict.sentence for verdict in self._verdicts] or ["NOT MEASURED: nothing was attacked"],
            f"A leak is a reconstruction of at least {criterion.written(criterion.threshold)} that is nearer to its "
            f"sample than the best guess made without the update, and nearer to it than to other samples. "
            f"{legend} No sentence here is a statement of safety.",
        ]

    def _told(self, *keys: str) -> Table:
        rows = [[QUESTIONS[key], self.about.get(key, f"NOT GIVEN ({key}, in the file of --about)")] for key in keys]
        return Table(["Asked", "Answer of the operator"], rows)

    @property
    def _system(self) -> list[Block]:
        told = self._told("system", "controller", "purposes", "data", "people", "access")
        return [told, "What was played, by the run's scenario:", Table(["Part", "Setting"], list(self._played()))]

    def _played(self) -> Iterator[tuple[str, str]]:
        scenario = self._scenario
        data, model, training = (_named(scenario.get(part)) for part in ("data", "model", "training"))
        mix = summary.label_mix(self.folder.read_table("partition"))
        dealt = f"; {mix.counts.sum():,} samples at {len(mix.clients)} clients" if mix else ""
        yield "Data", f"{data['name'] or 'digits'}{dealt}"
        yield "Model", f"{model['name'] or 'not named'}, loss {_named(scenario.get('loss'))['name'] or 'cross_entropy'}"
        yield "Weights", attacked_weights(scenario, exits.status(self.folder), self._every)
        if rounds := max((arm.rounds for arm in self._arms), default=0):
            planned = exits.status(self.folder).get("rounds")
            settings = ", ".join(
                f"{name.replace('_', ' ')} {training[name]}"
                for name in ("algorithm", "epochs", "steps", "batch_size", "lr", "momentum")
                if training.get(name) is not None
            )
            yield "Training", f"{rounds} of {planned or rounds} rounds" + (f"; {settings}" if settings else "")
        else:
            yield "Training", "none in this run: one exchange of updates was attacked"
        yield "Attacked rounds", ", ".join(map(str, sorted({row["round"] + 1 for row in self._every}))) or "none"
        yield "Attacked clients", str(len({row["victim"] for row in self._every}))

    @property
    def _every(self) -> list[Row]:
        return [*self._attacks, *self._inferences]

    @property
    def _necessity(self) -> list[Block]:
        known = [arm for arm in self._arms if arm.accuracy is not None]
        accuracy = [f"{arm.name}: test accuracy {share(arm.accuracy)}" for arm in known]
        if len(self._arms) > 1 and any(arm.rounds for arm in self._arms):
            told = {verdict.arm: verdict for verdict in self._verdicts} if self._attacks else {}
            measured: list[Block] = [
                f"{words.effect_heading(self._arms)}:",
                accuracy[:1] + words.effects(self._arms, told),
            ]
            measured.append(words.ONE_TRAINING)
        else:
            measured = [accuracy or ["What the measures cost in accuracy was not measured: nothing was trained."]]
        return [self._told("necessity"), *measured]

    @property
    def _attackers(self) -> list[Block]:
        groups: dict[tuple[Any, Any], list[Row]] = {}
        for row in self._answered:
            given = row if "observes" in row else {**row, **self._given(row)}
            groups.setdefault((given["observes"], given["knowledge"]), []).append(given)
        tested = [
            [summary.setting(rows), ", ".join(dict.fromkeys(self._component(row["attack"]) for row in rows))]
            for rows in groups.values()
        ]
        return [
            Table(["Tested: an attacker who was given", "by"], tested or [["nothing was tested", ""]]),
            "Not tested here, and so nothing is said of them:",
            list(self._untested()),
        ]

    @cached_property
    def _answered(self) -> list[Row]:
        """Rows of attacks that have a result."""
        return [row for row in self._every if row["status"] in ANSWERED]

    def _given(self, row: Row) -> dict[str, Any]:
        """Return what an attack was given whose rows do not say so, because it rebuilds nothing."""
        spec = self._specs.get(row["attack"], {})
        knowledge = ",".join(spec.get("knowledge") or ())
        return {"observes": spec.get("observes"), "knowledge": knowledge, "batch_size": None}

    def _component(self, title: str) -> str:
        return str(self._specs.get(title, {}).get("name", title))

    def _untested(self) -> Iterator[str]:
        """Yield the attackers about whom this run says nothing."""
        given = [{**self._given(row), **row} for row in self._answered]
        specs = [self._specs.get(title, {}) for title in dict.fromkeys(row["attack"] for row in given)]
        names, views = {spec.get("name") for spec in specs}, {row["observes"] for row in given}
        granted = {grant for row in given for grant in (row["knowledge"] or "").split(",")}
        for view in registry.table("views"):
            if view not in views:
                yield f"who sees {registry.find('views', view).describe}"
        more = [registry.find("grants", name).describe for name in registry.table("grants") if name not in granted]
        if more:
            yield f"who is also given: {'; '.join(more)}"
        if not any(spec.get("earlier") or (spec.get("averages") or 1) > 1 for spec in specs):
            yield "who combines the answers of several rounds, or repeated answers"
        if not names & {"imprint", "peftleak"}:
            yield "a server that sends weights or layers of its own making so that clients reveal more"
        if "gan" not in names:
            yield "a client that trains a generator against the models that it is sent"
        yield "anyone who has only the finished model, or queries it: rayfed attacks what clients send in training"

    @property
    def _budgets(self) -> Block:
        grouped: dict[str, list[Leak]] = {}
        for leak in self._leaks:
            grouped.setdefault(self._component(leak.attack), []).append(leak)
        rows = [self._budget(name, leaks) for name, leaks in grouped.items()]
        for claim in self._claims:
            row = [self._component(claim.attack), self._version, "–", "–", "–"]
            if row not in rows:
                rows.append(row)
        headings = ["Attack", "Version", "Iterations of a search", "Reconstructions", "Time in all"]
        return Table(headings, rows) if rows else "No attack was played."

    def _budget(self, name: str, leaks: Sequence[Leak]) -> list[str]:
        searched = [leak.iterations for leak in leaks if leak.iterations and leak.iterations.high]
        low = min((spread.low for spread in searched), default=0.0)
        high = max((spread.high for spread in searched), default=0.0)
        iterations = "closed form" if not searched else f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
        seconds = sum(leak.seconds.mean * leak.seconds.n for leak in leaks if leak.seconds)
        return [name, self._version, iterations, f"{sum(leak.images for leak in leaks):,}", duration(seconds)]

    @cached_property
    def _version(self) -> str:
        version = optional_document(self.original, ENVIRONMENT).get("rayfed")
        return f"rayfed {version}" if version else "not recorded"

    @property
    def _recovered(self) -> list[Block]:
        rows = [self._rate(finding) for finding in self._findings]
        noun = criterion_of(self._scenario, self._attacks).noun
        article = "An" if noun == "image" else "A"
        if not rows:
            return ["NOT MEASURED: no attack that rebuilds samples was played."]
        headings = ["Arm", "Batch", f"{noun.capitalize()}s recovered", "Rate", "95 % interval", "By"]
        recognised = [
            f"{leak.arm}, {leak.attack}: re-identified {METRICS[name].title}: {self._exact(leak, name)}, chance "
            f"{share(chance(name, leak.people))}{self._no_evidence(leak.arm)}"
            for leak in self._leaks
            for name in TOP
            if leak.scores[name] and leak.people
        ]
        return [
            Table(headings, rows),
            f"{article} {noun} counts once as recovered if any attack on it is a leak as defined above. Intervals are "
            "exact (Clopper and Pearson) for samples drawn independently from the same source; those behind one update "
            "are not independent. A rate of 0 says only that these attacks recovered none of this many.",
            *([recognised] if recognised else []),
            *self._worst,
        ]

    def _rate(self, finding: Finding) -> list[str]:
        cells = [finding.arm, str(finding.batch)]
        if finding.state not in ("leaks", "not reconstructed"):
            return [*cells, "–", finding.state.upper(), "–", "–"]
        if part := finding.part if not finding.leaked else None:
            read = f"none whole; {part.samples} of {finding.samples} in part"
            return [
                *cells,
                read,
                f"{share(part.found)} of their {PARTS[criterion_of(self._scenario, self._attacks).modality]}",
                "–",
                part.attack,
            ]
        found = roc.share(finding.leaked, finding.samples)
        interval = f"{share(found.low)} to {share(found.high)}"
        by = finding.by if finding.leaked else "–"
        return [*cells, f"{finding.leaked} of {finding.samples}", share(found.value), interval, by]

    def _no_evidence(self, arm: str) -> str:
        """Return that a low figure says nothing of an arm, where its verdict is no answer."""
        states = [verdict.state for verdict in self._verdicts if verdict.arm == arm and not verdict.answered]
        return "".join(f"; no evidence of protection, for the verdict on {arm} is {state}" for state in states)

    def _exact(self, leak: Leak, name: str) -> str:
        spread = leak.scores[name]
        assert spread is not None
        hits = round(spread.mean * spread.n)
        found = roc.share(hits, spread.n)
        return f"{hits} of {spread.n}, {share(found.value)} (95 % interval {share(found.low)} to {share(found.high)})"

    @cached_property
    def _worst(self) -> list[Block]:
        """The closest sample: a sentence, a picture if samples are shown, and its hashes."""
        criterion = criterion_of(self._scenario, self._attacks)
        row = closest(self._attacks, criterion)
        if row is None:
            return ["NOT MEASURED: no attack made a reconstruction that could be scored."]
        mix = summary.label_mix(self.folder.read_table("partition"))
        classes = mix.classes if mix and self._samples.truth else None
        said = words.closest_sample(row, criterion, f"under arm {row['arm']}", classes)
        blocks: list[Block] = [" ".join([f"{said[0].heading}:", *said[0].lines, *said[1].lines])]
        return [*blocks, *self._shown(row)]

    def _shown(self, row: Row) -> Iterator[Block]:
        """Yield the closest sample, if samples are shown, and its hashes."""
        for table, is_image in (("images", True), ("texts", False)):
            found = next((one for one in self.original.read_table(table).to_pylist() if key(one) == key(row)), None)
            if found is None:
                continue
            samples = self._samples
            if samples.any and is_image:
                true, rebuilt = samples.true_image(found["true"]), samples.image(found["reconstructed"])
                yield Picture(true, rebuilt, near(row), is_image=True)
            elif samples.any:
                true_words = samples.true_words(found["true"])
                said = None if true_words is None else " ".join(true_words)
                yield Picture(said, " ".join(samples.words(found["reconstructed"])), near(row), is_image=False)
            if not is_image and not samples.truth:
                yield "No hash is printed: a text or a row could be found from it by trying values."
                continue
            kind = "PNG" if is_image else "words, a line each"
            hashes = {name: _of_sample(found[name], is_image) for name in ("true", "reconstructed")}
            told = ", ".join(f"{name} {digest}" for name, digest in hashes.items())
            yield f"SHA-256 ({kind}), by which anyone who has it can recognise it: {told}"

    @property
    def _inferred(self) -> list[Block]:
        found = [self._claim(claim) for claim in self._claims]
        missing = {
            "auc": "whether somebody took part (membership inference)",
            "accuracy": "attributes of a client's data (attribute or property inference)",
            "class_share": "what samples of a class look like (model inversion by a generator)",
        }
        measured = {claim.metric for claim in self._claims if claim.value}
        unasked = [f"NOT MEASURED: {what}" for metric, what in missing.items() if metric not in measured]
        outside = (
            "NOT MEASURED: what queries to the finished model give away (regurgitation, exfiltration, model inversion "
            "by its outputs). rayfed attacks what is exchanged in training; a model that is published or queried needs "
            "tests of its own."
        )
        return [[*found, *unasked, outside]]

    def _claim(self, claim: Claim) -> str:
        if claim.roc:
            control = f", control without the update {area(claim.roc.control)}" if claim.roc.control else ", no control"
            told = "; ".join(stated(claim.roc, rate) for rate in claim.roc.true_positives)
            members = f"{claim.roc.members} members and {claim.roc.non_members} others"
            found = (
                f"{in_words(claim.roc)}: {members}, pooled AUC {area(claim.roc.auc)}{control}; {told} (95 % intervals)"
            )
            return f"{claim.arm}, {claim.attack}: {found}"
        if not claim.value or not claim.chance:
            return f"{claim.arm}, {claim.attack}: NOT MEASURED, it has no answer"
        metric = claim.metric.replace("_", " ")
        return f"{claim.arm}, {claim.attack}: {metric} {claim.value.mean:.2f} (chance {claim.chance.mean:.2f})"

    @property
    def _measures(self) -> list[Block]:
        arms = [[arm.name, " → ".join(arm.defences) or "none"] for arm in self._arms]
        blocks: list[Block] = [self._told("measures"), Table(["Arm", "Measures that were played"], arms)]
        proved, attacks, inferences = self._rows("proved"), self._attacks, self._inferences
        if not self._privacy:
            trained = any(arm.rounds for arm in self._arms)
            why = "no account was kept" if trained else "nothing was trained here"
            blocks.append(f"Nothing is proved of a training: {why}.")
        bounds = [f"{row['arm']}, by {row['defence']}: {said}" for row in self._privacy for said in words.bounds(row)]
        none = [f"{row['arm']}: {row['note']}" for row in self._privacy if row["note"] and not row["defence"]]
        held = words.guarantees(self._privacy, words.secure(self._scenario)).lines if self._privacy else []
        beside = [str(one) for one in nearest_to_bounds(comparisons(proved, attacks, inferences))]
        over = [f"{attack} on {arm}" for arm, attack in uncovered(self._privacy, proved, attacks, inferences)]
        blocks += [block for block in (held, none, bounds) if block]
        if beside:
            blocks += ["Measurements nearest to what is proved:", beside]
        if over:
            blocks.append(f"Nothing is proved of what was seen by {', '.join(over)}: no epsilon covers it.")
        return blocks

    @property
    def _unmeasured(self) -> Block:
        found = []
        for cell in self._findings:
            if cell.state in ("not measured", "inconclusive", "nothing to attack") or cell.unplayed:
                short = f"no time for {', '.join(cell.unplayed)}" if cell.unplayed else ""
                why = "; ".join([*filter(None, [cell.lacking, short]), *cell.reasons])
                why = why or "the attacks rebuilt nothing without a defence either"
                found.append(f"{cell.arm}, batch {cell.batch}: {cell.state}: {why}")
        silent: dict[tuple[str, str, str], dict[str, int]] = {}
        guesses: list[Leak | Claim] = [*self._leaks, *self._claims]
        for one in guesses:
            for (status, message), count in one.failures.items():
                arms = silent.setdefault((self._component(one.attack), status, message), {})
                arms[one.arm] = arms.get(one.arm, 0) + count
        for (attack, status, message), arms in silent.items():
            where = ", ".join(f"{arm} ({count})" for arm, count in arms.items())
            found.append(f"{attack}: {status} on updates of {where}" + (f": {message}" if message else ""))
        if not self._attacks:
            found.append("no samples were rebuilt: no attack of that kind was played")
        seed = self._scenario.get("seed")
        found.append(f"seeds other than {seed}: one run says nothing about the spread over seeds")
        found.append("clients and rounds other than those attacked, and data other than these")
        return list(dict.fromkeys(found))

    @property
    def _environment(self) -> Block:
        document = optional_document(self.folder, ENVIRONMENT)
        if not document:
            return "Left out." if self.redacted else "The run did not record it."
        kept = {name: value for name, value in document.items() if name not in _PLACES}
        return "; ".join(f"{name} {value}" for name, value in flat(kept)) + "."

    @property
    def _hashes(self) -> list[Block]:
        last = optional_document(self.original, ENVIRONMENT)
        sessions = [one.get("hashes") or {} for one in [*last.get("earlier", []), last]]
        recorded = sessions[-1] | {"weights": sessions[0].get("weights")}
        rows = []
        for part, title in (("code", "Code"), ("data", "Data"), ("weights", "Weights at the start")):
            of = recorded.get(part) or {}
            named = ((self._name(part, name, place), one) for place, (name, one) in enumerate(of.items()))
            rows += [[f"{title}: {name}", str(one)] for name, one in named]
            if part != "weights":  # which are others at each resume
                rows += self._before(part, title, of, sessions)
            rows += [] if of else [[title, "not recorded by this run"]]
        for name in (SCENARIO, ENVIRONMENT, ABOUT):
            if self.original.exists(name):
                rows.append([name, sha256(self.original.read_bytes(name)).hexdigest()])
        rows += [[f"Table {table}", digest] for table in TABLES if (digest := _of_table(self.original, table))]
        return [
            Table(["What", "SHA-256"], rows),
            "A table's hash is that of the lines that “sha256sum TABLE/*.parquet” prints in the run's folder. “rayfed "
            f"statement RUN{' --redact' if self.redacted else ''}” makes this statement again from the folder alone.",
        ]

    def _before(self, part: str, title: str, now: Row, sessions: Sequence[Row]) -> list[list[str]]:
        """Return the hashes of a part that sessions before the last resume had, where they differ."""
        rows: dict[tuple[str, str], None] = {}
        for session in sessions:
            for name, one in (session.get(part) or {}).items():
                if one != now.get(name):
                    place = list(now).index(name) if name in now else len(now)
                    rows[f"{title}: {self._name(part, name, place)}, before a resume", str(one)] = None
        return [list(row) for row in rows]

    def _name(self, part: str, name: str, place: int) -> str:
        """Return the name of what was hashed; a module of the user gets a number if names are left out."""
        return f"module {place}" if self.redacted and part == "code" and name != "rayfed" else name


def _of_table(folder: RunFolder, table: str) -> str | None:
    """Return the hash over the valid parts of a table; None if it has none."""
    lines = [f"{sha256(folder.read_bytes(name)).hexdigest()}  {name}\n" for name in folder.parts(table)]
    return sha256("".join(lines).encode()).hexdigest() if lines else None


def _of_sample(sample: Any, is_image: bool) -> str:
    """Return the hash of an image's bytes, or of words, one per line."""
    return sha256(sample if is_image else "\n".join(sample).encode()).hexdigest()


def _named(part: Any) -> dict[str, Any]:
    """Return a section of a scenario as a mapping with a name, which may be None."""
    return {"name": None, **part} if isinstance(part, Mapping) else {"name": part}
