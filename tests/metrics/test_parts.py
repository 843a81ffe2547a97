"""What attacks find of samples in part: columns of records and tokens of texts, beyond what guesses and chance find."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest
import torch
from sklearn import datasets
from torch import Tensor, nn

from rayfed.evidence.criteria import Criterion
from rayfed.evidence.findings import cells_without_adaptive_attack, compute_findings
from rayfed.evidence.parts import LEVEL, beyond_chance
from rayfed.metrics.assignment import assign
from rayfed.metrics.chance import evidence
from rayfed.metrics.guessing import Others, above_baseline, best_constants
from rayfed.metrics.parts import NAMES, parts
from rayfed.metrics.score import Scorer
from rayfed.samples import Column, Pixels, Records, Tokens
from tests.helpers.result_fixtures import attacked

COLUMNS = tuple(
    Column(f"c{place}", ("a", "b") if place % 3 == 2 else (), 0.0, 1.0, 0.15) for place in range(7)
)  # five numbers and two categories
ROWS = Records(COLUMNS)
TEXTS = Tokens(tuple(map(str, range(30))), 8, pad=0)


def rows(count: int, seed: int) -> Tensor:
    """Records drawn from bells and coins."""
    generator = torch.Generator().manual_seed(seed)
    columns = [
        torch.eye(2)[torch.randint(2, (count,), generator=generator)]
        if column.categories
        else (0.5 + 0.15 * torch.randn(count, 1, generator=generator)).clamp(0, 1)
        for column in COLUMNS
    ]
    return torch.cat(columns, 1)[:, None, None]


def without_last(true: Tensor) -> Tensor:
    """The records with everything but the last column, whose value is far out."""
    found = true.clone()
    found[..., -1] = 1e6
    return found


def told(true: Tensor, guess: Tensor, attack: str = "a", victim: int = 0, arm: str = "none") -> list[dict[str, Any]]:
    """Rows of the table of attacks on a batch of records."""
    scored = Scorer(Criterion.from_modality("records", None).names, sample=ROWS, others=Others(rows(300, 1)))
    found = scored.score(true, torch.zeros(len(true), dtype=torch.int64), guess, torch.zeros(len(true)))
    usual = {"victim": victim, "batch_size": len(true), "knowledge": []}
    return [attacked(arm, attack, **{**row, **usual, "fit": 1e-6}) for row in found]


def test_a_record_of_which_all_columns_but_one_are_read_is_no_record_that_holds() -> None:
    true = rows(2, 2)
    read = [row for i in range(2) for row in told(true[i : i + 1], without_last(true[i : i + 1]), victim=i)]
    assert [row["feature_accuracy"] for row in read] == [6 / 7, 6 / 7], "below the threshold of a whole record"
    criterion = Criterion.from_modality("records", None)
    [finding] = compute_findings(read, criterion)
    assert (finding.state, finding.leaked) == ("leaks", 0)
    assert finding.part is not None
    assert finding.part.recovered == pytest.approx(6 / 7)
    assert {name for name, *_ in finding.part.columns} == {f"c{place}" for place in range(6)}


def test_a_column_that_is_far_out_hides_no_whole_record() -> None:
    """Of squared errors, one unread column far out would be all that counts."""
    many = Records(tuple(Column(f"c{place}", (), 0.0, 1.0, 0.15) for place in range(20)))
    draw = [(0.5 + 0.15 * torch.randn(n, 1, 1, 20, generator=torch.Generator().manual_seed(n))) for n in (4, 300)]
    true, others = (one.clamp(0, 1) for one in draw)
    scorer = Scorer(Criterion.from_modality("records", None).names, sample=many, others=Others(others))
    labels = torch.zeros(4, dtype=torch.int64)
    found = scorer.score(true, labels, without_last(true).flip(0), labels)
    assert [row["order"] for row in found] == [3, 2, 1, 0]
    assert all(Criterion.from_modality("records", None).leaks(row) for row in found)


@pytest.mark.parametrize("batch", [1, 4])
def test_answers_that_say_nothing_of_the_sample_are_found_in_no_part(batch: int) -> None:
    """Noise, another record, and the mean of all, each matched to the true ones as they fit best."""
    seen = 0
    for seed in range(10, 50):
        true = rows(batch, seed)
        nothing = {
            "noise": torch.rand(true.shape, generator=torch.Generator().manual_seed(seed)),
            "another": rows(batch, 1000 + seed),
            "mean": rows(300, 1).mean(0).expand_as(true),
        }
        seen += sum(beyond_chance(told(true, guess, attack)) is not None for attack, guess in nothing.items())
    assert seen == 0


def test_a_guess_that_is_right_by_itself_is_no_part() -> None:
    typical = rows(300, 1).mean(0, keepdim=True)
    assert beyond_chance(told(typical, typical)) is None


def test_the_bound_on_chance_is_above_the_binomial_tail() -> None:
    for found in range(13, 41):
        row = {"parts_recovered": found / 40, "parts_baseline": 0.3, "columns": None}
        row["parts_evidence"] = evidence(found / 40, 0.3, 40.0)
        tail = sum(comb(40, k) * 0.3**k * 0.7 ** (40 - k) for k in range(found, 41))
        if beyond_chance([attacked("none", "a", **row)]):
            assert tail <= LEVEL
    assert tail < LEVEL, "and all of them are told"
    assert beyond_chance([attacked("none", "a", **row)])


def figures(share: float, count: float = 7.0, **more: Any) -> dict[str, Any]:
    told = evidence(share, 0.3, count) if share > 0.3 else 0.0
    return {"parts_recovered": share, "parts_baseline": 0.3, "parts_evidence": told, "columns": None, **more}


def test_repeats_of_a_sample_make_no_evidence_and_other_samples_do() -> None:
    assert beyond_chance([attacked("none", "a", **figures(0.7))]) is None
    assert beyond_chance([attacked("none", "a", **figures(0.7)) | {"repeat": k} for k in range(9)]) is None
    assert beyond_chance([attacked("none", "a", sample=k, **figures(0.7)) for k in range(9)])


def test_no_unread_samples_and_no_other_rounds_hide_one_that_is_read() -> None:
    one = attacked("none", "a", **figures(0.85, 20.0))
    nothing = [attacked("none", "a", sample=k, **figures(0.2, 20.0, identified=0.0)) for k in range(1, 32)]
    rounds = [attacked("none", "a", **figures(0.3, 20.0, identified=0.0)) | {"round": k} for k in range(1, 8)]
    for others in ([], nothing, rounds):
        part = beyond_chance([one, *others])
        assert part is not None
        assert (part.samples, part.recovered) == (1, 0.85)


def test_one_column_that_is_read_in_all_records_is_named() -> None:
    def record(victim: int, hit: bool) -> dict[str, Any]:
        columns = [{"name": "diagnosis", "found": hit, "guess": 0.3}, {"name": "age", "found": False, "guess": 0.2}]
        return attacked("none", "a", **figures(0.5 * hit, columns=columns, identified=0.0)) | {"victim": victim}

    part = beyond_chance([record(victim, True) for victim in range(16)])
    assert part is not None
    assert part.columns == (("diagnosis", 1.0, 0.3),)
    assert beyond_chance([record(victim, victim % 3 == 0) for victim in range(16)]) is None
    assert beyond_chance([record(victim % 3, True) for victim in range(16)]) is None, "clients' records are alike"


def test_what_is_no_number_is_no_evidence() -> None:
    assert beyond_chance([attacked("none", "a", **figures(0.9, 40.0, parts_baseline=float("nan")))]) is None


def test_an_attack_that_reads_parts_without_a_defence_shows_that_it_works() -> None:
    bare = [attacked("none", "a", sample=k, **figures(0.88, 8.0, feature_accuracy=0.88)) for k in range(4)]
    held = figures(0.2, 8.0, identified=0.0, feature_accuracy=0.2, above_baseline=-0.1)
    behind = [attacked("noise", "a", sample=k, **held) for k in range(4)]
    criterion = Criterion.from_modality("records", None)
    assert [one.state for one in compute_findings([*bare, *behind], criterion)] == ["leaks", "not reconstructed"]
    assert cells_without_adaptive_attack([*bare, *behind], criterion, ["none"]) == {}


@pytest.mark.parametrize(
    ("kind", "most"),
    [("a cluster of near copies", 8), ("a client's range", 1), ("a class", 1)],  # of 30; of seven copies one is nearest
)
def test_answers_that_fit_many_records_alike_read_none(kind: str, most: int) -> None:
    """A constant in a cluster, any constant where a client's records are alike, and what is typical of a class."""
    many, seen = Records(tuple(Column(f"c{place}", (), 0.0, 1.0, 0.23) for place in range(20))), 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        others, centre, constant = (torch.rand(n, 1, 1, 20, generator=generator) for n in (300, 1, 1))
        width = 0.1 if kind == "a class" else 0.02
        alike = (centre + width * torch.randn(166, 1, 1, 20, generator=generator)).clamp(0, 1)
        count, known = {"a cluster of near copies": (1, 6), "a client's range": (16, 0), "a class": (16, 150)}[kind]
        true, others[:known] = alike[:count], alike[count : count + known]
        guess = (constant if kind == "a client's range" else centre).expand_as(true) + 0.0
        scorer = Scorer(Criterion.from_modality("records", None).names, sample=many, others=Others(others))
        labels = torch.zeros(count, dtype=torch.int64)
        rows = scorer.score(true, labels, guess, labels)
        seen += beyond_chance([attacked("none", "a", **row) for row in rows]) is not None
    assert seen <= most


def test_texts_of_padding_alone_say_nothing() -> None:
    others = TEXTS.scored(torch.cat([torch.zeros(1, 8, dtype=torch.int64), torch.randint(1, 30, (50, 8))]))
    true, guess = (TEXTS.scored(torch.randint(1, 30, (3, 8))) for _ in range(2))
    for row in parts(TEXTS, Others(others), true, guess):
        assert row["parts_baseline"] == row["parts_baseline"] < 1
        assert row["parts_evidence"] >= 0


def test_the_best_constants_of_columns_are_guesses() -> None:
    """A number that is 0 or 1: its mean is neither."""
    coins = Records(tuple(Column(f"c{place}", (), 0.0, 1.0, 0.46) for place in range(10)))
    others, true = (
        (torch.rand(n, 1, 1, 10, generator=torch.Generator().manual_seed(n)) < 0.3).float() for n in (300, 40)
    )
    gain = above_baseline(coins, Others(others))(true, torch.zeros_like(true))
    assert (gain <= 1e-9).all()
    record, shares = best_constants(coins, Others(others))
    assert not record.any()
    assert shares == pytest.approx((others == 0).double().mean((0, 1, 2)).tolist())


def test_of_texts_tokens_count_and_padding_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    true, others = (torch.randint(1, 30, (n, 8), generator=generator) for n in (3, 200))
    true[:, 6:] = 0
    guess = true.clone()
    guess[:, 0] = 0
    inputs = [TEXTS.scored(one) for one in (true, guess)]
    found = parts(TEXTS, Others(TEXTS.scored(others)), *inputs)
    assert [row["parts_recovered"] for row in found] == [pytest.approx(5 / 6)] * 3
    assert all(row["columns"] is None for row in found)
    rows = [attacked("none", "a", sample=i, **row) for i, row in enumerate(found)]
    assert beyond_chance(rows)


def test_what_is_not_finite_has_no_parts() -> None:
    true = rows(2, 2)
    guess = true.clone()
    guess[0] = float("nan")
    first, second = told(true, guess)
    assert [first[name] for name in NAMES] == [None] * 4
    assert second["parts_recovered"] == 1


def test_others_are_matched_as_the_batch_is() -> None:
    """Of answers in any order the best pairs are made, which finds more of other records, too."""
    others, guess = rows(300, 1), rows(8, 3)
    alone = parts(ROWS, Others(others), guess[:1], guess[:1])[0]["parts_baseline"]
    best = [ROWS.found(one, guess[assign(one, guess, ROWS)]).double().mean() for one in others[: 300 // 8 * 8].split(8)]
    by_chance = (8 * float(sum(best)) + 1) / (len(best) * 8 + 1)
    assert min(row["parts_baseline"] for row in parts(ROWS, Others(others), guess, guess)) >= by_chance - 1e-9
    assert by_chance > alone


def photographs(count: int, seed: int, size: int = 32) -> Tensor:
    """Images with texture at several scales, (N, 3, size, size)."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        nn.functional.interpolate(torch.randn(count, 3, n, n, generator=generator), size=size, mode="bilinear")
        for n in (2, 4, 8, 16, 32)
    ]
    return (0.5 + 0.15 * sum(layers)).clamp(0, 1)


def of_images(true: Tensor, guess: Tensor, others: Tensor) -> list[dict[str, Any]]:
    """Rows of the table of attacks on images, a victim each."""
    criterion = Criterion.from_modality("pixels", None)
    scorer = Scorer(criterion.names, sample=Pixels(*true.shape[1:]), others=Others(others))
    labels = torch.zeros(1, dtype=torch.int64)
    found = [scorer.score(true[i : i + 1], labels, guess[i : i + 1], labels)[0] for i in range(len(true))]
    return [
        attacked("none", "a", **{**row, "victim": i, "batch_size": 1, "knowledge": [], "fit": 0.0})
        for i, row in enumerate(found)
    ]


PARTS_OF_IMAGES = {
    "a quarter": lambda y, x: (y < 16) & (x < 16),
    "the middle": lambda y, x: (abs(y - 16) < 8) & (abs(x - 16) < 8),
    "every third column": lambda y, x: x % 3 == 0,
    "pixels here and there": lambda y, x: (7 * y + 13 * x) % 5 == 0,
}


@pytest.mark.parametrize("fill", [0.0, 0.5, "mean"])
@pytest.mark.parametrize("which", PARTS_OF_IMAGES)
def test_an_image_of_which_a_part_is_read_leaks_in_part(which: str, fill: float | str) -> None:
    """Wherever the part is, and whatever the attack puts where it knows nothing."""
    true, others = photographs(2, 1), photographs(100, 2)
    others = torch.cat([others, 0.05 * others[:2], 0.95 + 0.05 * others[:2]])  # dark and light ones are like a fill
    seen = PARTS_OF_IMAGES[which](torch.arange(32)[:, None], torch.arange(32)[None])
    rest = others.mean(0) if isinstance(fill, str) else torch.full_like(true[0], fill)
    rows = of_images(true, torch.where(seen, true, rest), others)
    criterion = Criterion.from_modality("pixels", None)
    assert not any(map(criterion.leaks, rows)), "none is near as a whole"
    [finding] = compute_findings(rows, criterion)
    assert finding.part is not None
    assert finding.part.samples == 2
    share = float(seen.double().mean())
    assert finding.part.recovered == pytest.approx(share, abs=0.1)
    assert finding.part.baseline < finding.part.recovered
    assert finding.state == "leaks"


@pytest.mark.parametrize("others", [20, 100])
def test_answers_that_say_nothing_of_an_image_are_found_in_no_part(others: int) -> None:
    """Noise, constants of every brightness, other images, and what many have in common."""
    pool = photographs(others, 3)
    for seed in range(4):
        true = photographs(8, 10 + seed)
        generator = torch.Generator().manual_seed(seed)
        nothing = {
            "noise": torch.rand(true.shape, generator=generator),
            "mean": pool.mean(0).expand_as(true),
            "mean colour": true.mean((2, 3), keepdim=True).expand_as(true),
            "others": photographs(8, 1000 + seed),
            "shuffled": true.flatten(2)[..., torch.randperm(1024, generator=generator)].view_as(true),
            "blurred mean": nn.functional.avg_pool2d(pool, 5, 1, 2).mean(0).expand_as(true),
            **{f"all {grey}": torch.full_like(true, grey) for grey in (0.0, 0.25, 0.5, 1.0)},
        }
        for attack, guess in nothing.items():
            assert beyond_chance(of_images(true, guess, pool)) is None, attack


def test_digits_of_a_class_say_nothing_of_each_other() -> None:
    """An answer may be the mean of the class, or another digit of it, and be found nearer than many."""
    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    true, known, others = order[:32], order[32:1000], order[1000:1300]
    of_class = [known[labels[known] == label] for label in labels[true].tolist()]
    answers = {
        "mean": torch.stack([images[own].mean(0) for own in of_class]),
        "one": torch.stack([images[own[0]] for own in of_class]),
        "black and white": torch.stack([images[own].mean(0).round() for own in of_class]),
    }
    for attack, guess in answers.items():
        assert beyond_chance(of_images(images[true], guess, images[others])) is None, attack


def test_a_public_image_and_another_of_the_batch_are_others() -> None:
    """Whoever holds an image that looks alike has read nothing."""
    true, others = photographs(2, 1), photographs(100, 2)
    alike = (true[0] + 0.02 * torch.randn(true[0].shape, generator=torch.Generator().manual_seed(3))).clamp(0, 1)
    batch, answer = torch.stack([true[0], alike]), torch.stack([alike, alike])
    for known, truth, guess in (
        (Others(others, public=alike[None]), true[:1], alike[None]),
        (Others(others), batch[:1], alike[None]),
        (Others(others), batch, answer),
    ):
        [first, *_] = parts(Pixels(3, 32, 32), known, truth, guess)
        assert (first["parts_evidence"] > 0) == (known.public is None and len(truth) == 1)


def test_of_few_other_images_nothing_is_said_of_parts() -> None:
    true = photographs(1, 1)
    [row] = of_images(true, true, photographs(19, 2))
    assert [row[name] for name in NAMES] == [None] * 4
    [row] = of_images(true, true, torch.cat([photographs(19, 2), true]))
    assert row["parts_recovered"] is None, "a copy is no other image"
    [row] = of_images(true, true, photographs(20, 2))
    assert row["parts_recovered"] > 0.9
