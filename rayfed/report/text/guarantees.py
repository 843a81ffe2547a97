"""Text on guarantees of differential privacy, and on encryption keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayfed.evidence.guarantee_compat import list_kinds, mixed_guarantees
from rayfed.evidence.rows import Row
from rayfed.evidence.settings import Setting
from rayfed.privacy.printing import caution_text, format_upper
from rayfed.report.text.formats import format_count

_BOUNDS = {"epsilon": "epsilons", "rero": "bounds on reconstruction"}
_EMPIRICAL = "are empirical: they hold for these attacks, data and rounds. A stronger attack may reconstruct more."
_OF_IMAGES = " PSNR compares images pixel by pixel, so look at the images as well."
_COVERED = (
    "A guarantee covers every attack on the updates of the training, for the unit and the adversary that it names. "
    "It does not cover updates that attacks observe outside the training. All other results "
)
_NO_DEFENCE = "None: no defence of this run has an (ε, δ). All results "
_NO_TRAINING = (
    "None: an (ε, δ) covers a training, and nothing was trained. To obtain one, train with a defence such as `dp_sgd`. "
    "All results "
)
_SEEDED = (
    "Noise is derived from the seed. Use this run to measure, not to protect data. "
    "For real training set `privacy.secure: true`."
)


def mixed_guarantees_text(settings: Sequence[Setting], measure: str) -> str:
    """Return the different kinds of guarantee of a measure, with their settings; empty if they can be compared."""
    kinds = mixed_guarantees(settings, measure)
    if not kinds:
        return ""
    return f"the {_BOUNDS[measure]} are of different kinds and cannot be compared ({list_kinds(kinds)})"


def epsilon_text(row: Row) -> str:
    """Return the epsilon and delta of a row, rounded up."""
    return f"epsilon {format_upper(row['epsilon'])} at delta {format_upper(row['delta'])}"


def guarantee_text(row: Row) -> str:
    """Return the guarantee in a row of `privacy`, or why there is none."""
    note = row.get("note") or ""
    if row.get("epsilon") is None:
        return f"withdrawn for {row['defence']}: {note}" if row.get("defence") else f"none ({note})"
    defence = f" by {row['defence']}" if row.get("defence") else ""
    rounds = f"after {format_count(row['rounds'], 'round')}"
    protected = f"protects {row['adjacency']}, against {row['against']}{caution_text(row['epsilon'])}"
    limit = f"; {note}" if note else ""
    return f"{epsilon_text(row)}{defence} {rounds}, {protected}{limit}"


def setting_guarantee_text(row: Row) -> str:
    """Return the guarantee in a row of outcomes."""
    return f"{epsilon_text(row)} per {row['epsilon_unit']}{caution_text(row['epsilon'])}"


def guarantee_lines(privacy: Sequence[Row]) -> list[str]:
    """Return a heading and one line per arm with a guarantee, or with a reason why it has none; empty without arms."""
    stated = [row for row in privacy if row.get("epsilon") is not None or row.get("note")]
    if not stated:
        return []
    width = max(len(row["arm"]) for row in stated)
    return ["Privacy guarantees", *(f"  {row['arm']:<{width}}  {guarantee_text(row)}" for row in stated)]


def guarantee_sentences(
    privacy: Sequence[Row], secure: bool = True, images: bool = True, trained: bool = True
) -> list[str]:
    """Return the withdrawn and the given guarantees of a run, then their limits.

    A warning follows if the noise is not `secure`. Without rows, `trained` selects the reason: no mechanism has an
    account, or nothing was trained.
    """
    held, withdrawn = [], []
    for row in privacy:
        sentence = f"{row['arm']}: {guarantee_text(row)}."
        if row["epsilon"] is not None:
            held.append(sentence)
        elif row["defence"] is not None:
            withdrawn.append(sentence)
    lines = [*withdrawn, *held, limits_text(bool(held), images, trained)]
    return [*lines, _SEEDED] if held and not secure else lines


def limits_text(guaranteed: bool, images: bool, trained: bool = True) -> str:
    """Return the limits of guarantees and of empirical results; without a guarantee, first why there is none."""
    without = _NO_DEFENCE if trained else _NO_TRAINING
    start = _COVERED if guaranteed else without
    return start + _EMPIRICAL + (_OF_IMAGES if images else "")


def weakest_guarantees_text(settings: Sequence[Setting]) -> list[str]:
    """Return the weakest guarantee of each arm of a sweep."""
    rows = [row for one in settings if "epsilon" in one.measures for row in one.rows]
    weakest = {row["arm"]: row for row in sorted(rows, key=lambda row: row["epsilon"])}
    return [
        f"{arm}, weakest setting: {setting_guarantee_text(row)}. The table lists the ε of all settings."
        for arm, row in weakest.items()
    ]


def epsilons(privacy: Iterable[Row]) -> dict[str, str]:
    """Return each arm's epsilon with its unit (or `withdrawn`, `none`) from rows of `privacy`; omit other arms."""
    found: dict[str, list[str]] = {}
    for row in privacy:
        if row.get("epsilon") is not None:
            found.setdefault(row["arm"], []).append(f"{format_upper(row['epsilon'])} per {row['unit']}")
        elif row.get("defence"):  # the defence has a mechanism
            found.setdefault(row["arm"], []).append("withdrawn")
        elif row.get("note"):
            found.setdefault(row["arm"], []).append("none")
    return {arm: ", ".join(values) for arm, values in found.items()}


def short_keys_text(scenario: Row, swept: Iterable[int] = ()) -> list[str]:
    """Return warnings about insecure encryption keys; `swept` are the values of `key_bits` in a sweep."""
    places = {"federation": (scenario.get("federation") or {}).get("protection")}
    for name, arm in (scenario.get("arms") or {}).items():
        if isinstance(arm, Mapping):
            places[f"arm {name}"] = arm.get("protection")
    lengths: set[tuple[str, Any]] = {("swept", bits) for bits in swept}
    for place, protection in places.items():
        if isinstance(protection, Mapping) and protection.get("key_bits"):
            lengths.add((place, protection["key_bits"]))
    if not lengths:
        return []
    from rayfed.crypto.paillier import SECURE_BITS  # imports PyTorch

    return [
        f"Keys of {bits} bits ({place}) are insecure: anyone who sees a ciphertext can decrypt it. "
        f"Use at least {SECURE_BITS} bits."
        for place, bits in sorted(lengths)
        if bits < SECURE_BITS
    ]
