"""Metrics against scikit-image, formulas written out, and brute force."""

from __future__ import annotations

import warnings
from itertools import combinations, pairwise, permutations
from pathlib import Path

import lpips
import numpy as np
import pytest
import skimage.metrics
import torch
import torchvision
from scipy.stats import wasserstein_distance
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor
from torch.nn import functional as F

from rayfed.errors import UserError
from rayfed.metrics import score
from rayfed.metrics.assignment import assign
from rayfed.metrics.eight_bit import psnr_8bit, psnr_overflow, psnr_root, root_mse
from rayfed.metrics.images import mse, psnr, ssim, wasserstein
from rayfed.metrics.known import METRICS
from rayfed.metrics.labels import even_guess, label_accuracy
from rayfed.metrics.lpips import Lpips, LpipsUnavailable
from rayfed.metrics.measures import MEASURES, extreme_of
from rayfed.metrics.score import Scorer


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """Four 64x64 crops of a photograph, (4, 3, 64, 64) in [0, 1]."""
    picture = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1).float() / 255
    return torch.stack([picture[:, top : top + 64, 200:264] for top in (0, 100, 200, 300)])


@pytest.fixture(scope="module")
def digits() -> Tensor:
    """Six grey 8x8 digits, (6, 1, 8, 8) in [0, 1]."""
    return torch.from_numpy(load_digits().images[:6]).float().unsqueeze(1) / 16


def noisy(images: Tensor, deviation: float) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + deviation * noise).clamp(0, 1)


def test_eight_bit_metrics_are_those_of_files_in_numpy(photographs: Tensor) -> None:
    """Torchvision writes the files; NumPy squares their differences in uint8 (which overflows) and in float64."""
    guesses, to_file = noisy(photographs, 0.1), torchvision.transforms.ToPILImage()
    for true, guess in zip(photographs, guesses, strict=True):
        a, b = (np.asarray(to_file(image)) for image in (true, guess))
        error, wrapped = np.mean((a.astype(float) - b) ** 2), np.mean((a - b) ** 2)
        expected = (10 * np.log10(255**2 / each) for each in (error, wrapped, np.sqrt(error)))
        found = (metric(true[None], guess[None]).item() for metric in (psnr_8bit, psnr_overflow, psnr_root))
        assert tuple(found) == pytest.approx(tuple(expected))
        assert root_mse(true[None], guess[None]).item() == pytest.approx(np.sqrt(error))
    assert not root_mse(photographs, photographs).any()
    all_pixels = torch.arange(256)[None, None, None] / 255  # no value of an 8-bit file is truncated to the one below
    assert (to_file(all_pixels[0]).tobytes(), root_mse(all_pixels, all_pixels + 1e-4).item()) == (bytes(range(256)), 0)


def test_wasserstein_is_scipys_and_ignores_places(photographs: Tensor) -> None:
    guesses = noisy(photographs, 0.1)
    channels = [
        [wasserstein_distance(*(x.flatten().numpy() for x in pair)) for pair in zip(a, b, strict=True)]
        for a, b in zip(photographs, guesses, strict=True)
    ]
    assert wasserstein(photographs, guesses).tolist() == pytest.approx(np.mean(channels, 1).tolist())
    assert not wasserstein(photographs, photographs.flip(-1)).any()


def written_out_ssim(a: Tensor, b: Tensor, window: int) -> Tensor:
    """Wang et al. 2004, equation 13, with unbiased moments over a uniform window; the mean over whole windows."""
    a, b = a.double(), b.double()

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, window, stride=1)

    unbiased = window**2 / (window**2 - 1)
    variance_a, variance_b = (unbiased * (mean(x * x) - mean(x) ** 2) for x in (a, b))
    covariance = unbiased * (mean(a * b) - mean(a) * mean(b))
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean(a) * mean(b) + c1) / (mean(a) ** 2 + mean(b) ** 2 + c1)
    return (luminance * (2 * covariance + c2) / (variance_a + variance_b + c2)).flatten(1).mean(1)


@pytest.mark.parametrize("deviation", [0.02, 0.3])
@pytest.mark.parametrize("images", ["photographs", "digits"])
def test_pixel_metrics_equal_scikit_image(images, deviation, request):
    true = request.getfixturevalue(images)
    guess = noisy(true, deviation)
    for i, (a, b) in enumerate(zip(true.double().numpy(), guess.double().numpy(), strict=True)):
        assert mse(true, guess)[i] == pytest.approx(skimage.metrics.mean_squared_error(a, b), rel=1e-9)
        expected = skimage.metrics.peak_signal_noise_ratio(a, b, data_range=1)
        assert psnr(true, guess)[i] == pytest.approx(expected, rel=1e-9)
        channels = [skimage.metrics.structural_similarity(x, y, data_range=1) for x, y in zip(a, b, strict=True)]
        assert ssim(true, guess)[i] == pytest.approx(np.mean(channels), rel=1e-9)


COMPARING = [
    name
    for name, metric in METRICS.items()
    if metric.compares == "samples" and "pixels" in metric.modalities and not metric.needs
]


@pytest.mark.parametrize("name", COMPARING)
def test_a_copy_is_closer_than_noise_and_no_value_is_out_of_bounds(name, digits):
    metric = METRICS[name]
    copy, noise = metric.function(digits, digits), metric.function(digits, noisy(digits, 0.3))
    closer = copy > noise if metric.higher_is_closer else copy < noise
    assert closer.all()
    low, high = metric.bounds
    assert all(low <= value <= high for value in noise.tolist())


def test_ssim_equals_the_formula(photographs, digits):
    for true, window in ((photographs, 7), (digits, 7), (digits[..., :6, :5], 5)):
        guess = noisy(true, 0.1)
        torch.testing.assert_close(ssim(true, guess), written_out_ssim(true, guess, window))


def test_metrics_of_equal_images_and_of_a_known_error(photographs):
    assert mse(photographs, photographs).tolist() == [0] * 4
    assert psnr(photographs, photographs).tolist() == [float("inf")] * 4
    torch.testing.assert_close(ssim(photographs, photographs), torch.ones(4, dtype=torch.float64))
    grey = torch.full((1, 1, 16, 16), 0.5)
    assert psnr(grey, grey + 0.1).item() == pytest.approx(20, abs=1e-5)


@pytest.mark.parametrize(
    ("true", "classes"), [([3], 5), ([0, 0, 1], 2), ([1] * 9 + [0] * 7, 2), ([0, 1, 1, 2, 4, 4, 4], 5), ([2] * 8, 6)]
)
def test_an_even_guess_of_labels_finds_what_naming_classes_by_turns_finds_on_average(true, classes):
    labels = torch.tensor(true)
    each, more = divmod(len(true), classes)
    once = [c for c in range(classes) for _ in range(each)]
    named = [torch.tensor([*once, *extra]) for extra in combinations(range(classes), more)]
    assert even_guess(labels, classes) == pytest.approx(np.mean([label_accuracy(labels, guess) for guess in named]))


@pytest.mark.parametrize(
    ("true", "found", "share"),
    [([3], [3], 1), ([3], [4], 0), ([1, 1, 2], [2, 1, 0], 2 / 3), ([0, 1, 2], [2, 0, 1], 1), ([5, 5], [5, 6], 0.5)],
)
def test_label_accuracy_counts_a_multiset(true, found, share):
    assert label_accuracy(torch.tensor(true), torch.tensor(found)) == pytest.approx(share)


def test_assignment_undoes_a_permutation(photographs):
    shuffle = torch.tensor([2, 0, 3, 1])
    order = assign(photographs, noisy(photographs, 0.05)[shuffle])
    assert torch.equal(shuffle[order], torch.arange(4))


def test_assignment_is_the_best_of_all():
    draw = torch.Generator().manual_seed(1)
    true, guess = torch.rand(2, 5, 1, 2, 2, generator=draw)
    best = min(permutations(range(5)), key=lambda p: mse(true, guess[list(p)]).sqrt().sum().item())
    assert assign(true, guess).tolist() == list(best)


def test_assignment_tells_apart_what_differs_in_the_last_bits(photographs):
    base = photographs[:1].double()
    true = torch.cat([base, base + 1e-9])
    assert assign(true, true.flip(0)).tolist() == [1, 0]


def test_an_exact_copy_stays_with_its_image_where_squares_would_give_it_away():
    true = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).reshape(2, 1, 1, 2)
    guess = torch.tensor([[1.0, 0.0], [1.5, 0.5]]).reshape(2, 1, 1, 2)  # squares: 1 + 0.5 rather than 0 + 2.5
    assert assign(true, guess).tolist() == [1, 0]


def test_an_attack_that_could_not_strike_leaves_rows_without_figures():
    rows = Scorer(("psnr", "label_accuracy")).nothing(torch.tensor([3, 4]))
    assert rows == [
        {"sample": i, "true_label": label, "label": None, "psnr": None, "label_accuracy": None}
        for i, label in enumerate((3, 4))
    ]


def test_a_reconstruction_that_is_not_finite_is_matched_last(digits):
    guess = digits[[1, 0, 2]].clone()
    guess[2, 0, 3, 3] = float("nan")
    assert assign(digits[:3], guess).tolist() == [1, 0, 2]
    assert sorted(assign(digits[:3], torch.full_like(guess, float("inf"))).tolist()) == [0, 1, 2]


def test_rows_line_up_with_the_true_batch(photographs):
    shuffle = torch.tensor([2, 0, 3, 1])
    labels = torch.tensor([7, 8, 9, 7])
    guess = noisy(photographs, 0.05)
    rows = Scorer(("mse", "psnr", "ssim", "label_accuracy")).score(photographs, labels, guess[shuffle], labels[shuffle])
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    assert [shuffle[row["order"]].item() for row in rows] == [0, 1, 2, 3]
    assert [row["label"] for row in rows] == [row["true_label"] for row in rows] == labels.tolist()
    assert [row["label_accuracy"] for row in rows] == [1.0] * 4
    for name, metric in (("mse", mse), ("psnr", psnr), ("ssim", ssim)):
        assert [row[name] for row in rows] == metric(photographs, guess).tolist()


def test_a_diverged_image_has_no_metrics_and_does_not_spoil_the_others(digits):
    guess = digits.clone()
    guess[4] = float("inf")
    rows = Scorer(("mse", "ssim")).score(digits, torch.arange(6), guess, torch.arange(6))
    assert [row["mse"] for row in rows] == [0, 0, 0, 0, None, 0]
    assert rows[4]["ssim"] is None
    assert rows[4]["label"] == 4
    rows = Scorer(("psnr",)).score(digits, torch.arange(6), guess * float("nan"), torch.arange(6))
    assert [row["psnr"] for row in rows] == [None] * 6


def test_only_the_named_metrics_are_in_a_row(digits):
    rows = Scorer(("psnr",)).score(digits, torch.arange(6), digits, torch.arange(6))
    assert set(rows[0]) == {"sample", "order", "true_label", "label", "label_baseline", "psnr"}


def test_an_unknown_metric_is_named_with_the_nearest():
    with pytest.raises(UserError, match="'pnsr': did you mean 'psnr'"):
        Scorer(("mse", "pnsr"))


def test_lpips_without_weights_is_an_empty_column_with_one_warning(digits, tmp_path):
    score._functions.cache_clear()
    scorer = Scorer(("ssim", "lpips_alex", "lpips_vgg"), lpips_weights=str(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            rows = scorer.score(digits, torch.arange(6), digits, torch.arange(6))
    assert [row["lpips_alex"] for row in rows] == [row["lpips_vgg"] for row in rows] == [None] * 6
    assert rows[0]["ssim"] == pytest.approx(1)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "alexnet-owt-7be5be79.pth" in messages[0]
    assert "vgg16-397923af.pth" in messages[1]


@pytest.mark.engine
def test_weights_that_cannot_be_used_are_told_before_anything_is_scored(tmp_path, random_alexnet):
    (tmp_path / "alexnet_features.pth").write_bytes(b"not a state dict")
    torch.save({"epoch": 3, "state_dict": {}}, tmp_path / "vgg16_features.pth")
    alex, vgg = Scorer(("lpips_alex", "lpips_vgg"), lpips_weights=str(tmp_path)).unavailable()
    assert alex.startswith("the column lpips_alex stays empty: cannot read")
    assert vgg.startswith("the column lpips_vgg stays empty: ")
    assert "vgg16_features.pth" in vgg
    assert Scorer(("psnr", "lpips_alex"), lpips_weights=str(random_alexnet)).unavailable() == []


def test_lpips_says_which_file_is_missing_or_wrong(tmp_path):
    with pytest.raises(LpipsUnavailable, match=r"alexnet-owt-7be5be79\.pth"):
        Lpips("alex", tmp_path)
    junk = tmp_path / "junk.pth"
    junk.write_bytes(b"not a state dict")
    with pytest.raises(LpipsUnavailable, match=r"junk\.pth"):
        Lpips("alex", junk)
    torch.save({"features.0.weight": torch.zeros(2)}, junk)
    with pytest.raises(LpipsUnavailable, match=r"junk\.pth.*backbone"):
        Lpips("alex", junk)


@pytest.fixture(scope="module")
def random_alexnet(tmp_path_factory) -> Path:
    """An untrained AlexNet's whole state dict, as torchvision names it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = torchvision.models.alexnet()
    path = tmp_path_factory.mktemp("weights") / "alexnet-owt-7be5be79.pth"
    torch.save(network.state_dict(), path)
    return path


def written_out_lpips(features: torch.nn.Sequential, taps: list[int], heads: str, a: Tensor, b: Tensor) -> Tensor:
    """Zhang et al. 2018, equation 1, on torchvision's own `features`; `taps` are the ReLUs that are looked behind."""
    folder = Path(lpips.__file__).parent / "weights" / "v0.1"
    heads_of = torch.load(folder / f"{heads}.pth", map_location="cpu", weights_only=True)
    shift = torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)
    x, y = (((2 * images - 1) - shift) / scale for images in (a, b))
    total = torch.zeros(len(a))
    for index, layer in enumerate(features):
        x, y = layer(x), layer(y)
        if index in taps:
            difference = F.normalize(x, dim=1, eps=1e-10) - F.normalize(y, dim=1, eps=1e-10)
            head = heads_of[f"lin{taps.index(index)}.model.1.weight"]
            total = total + F.conv2d(difference**2, head).mean((1, 2, 3))
    return total


def features_of(arch: str, state: dict[str, Tensor]) -> torch.nn.Sequential:
    features = torchvision.models.get_model(arch, weights=None).features
    features.load_state_dict({key: tensor.float() for key, tensor in state.items()})
    return features.eval().requires_grad_(False)


@pytest.mark.engine
def test_lpips_equals_the_formula(random_alexnet, photographs):
    guess = noisy(photographs, 0.1)
    whole = torch.load(random_alexnet, weights_only=True)
    state = {k.removeprefix("features."): v for k, v in whole.items() if k.startswith("features.")}
    expected = written_out_lpips(features_of("alexnet", state), [1, 4, 7, 9, 11], "alex", photographs, guess)
    torch.testing.assert_close(Lpips("alex", random_alexnet)(photographs, guess), expected)


@pytest.mark.engine
def test_lpips_reads_folders_whole_networks_and_features_alone(random_alexnet, photographs, tmp_path):
    guess = noisy(photographs, 0.1)
    whole = torch.load(random_alexnet, weights_only=True)
    alone = {k.removeprefix("features."): v.half() for k, v in whole.items() if k.startswith("features.")}
    torch.save(alone, tmp_path / "alexnet_features_f16.pth")
    halved = {key: tensor.half() for key, tensor in whole.items()}
    torch.save(halved, tmp_path / "named-by-hand.pth")
    from_folder = Lpips("alex", tmp_path)(photographs, guess)
    assert torch.equal(from_folder, Lpips("alex", tmp_path / "named-by-hand.pth")(photographs, guess))


def test_lpips_repeats_grey_images_and_enlarges_small_ones(random_alexnet, digits):
    metric = Lpips("alex", str(random_alexnet))
    guess = noisy(digits, 0.2)
    enlarged, enlarged_guess = (
        F.interpolate(images.repeat(1, 3, 1, 1), (64, 64), mode="bilinear") for images in (digits, guess)
    )
    torch.testing.assert_close(metric(digits, guess), metric(enlarged, enlarged_guess))


def test_lpips_looks_into_the_hub_cache_and_leaves_the_global_generator_alone(random_alexnet, monkeypatch, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / random_alexnet.name).symlink_to(random_alexnet)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    before = torch.get_rng_state()
    Lpips("alex")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.engine
@pytest.mark.parametrize(
    ("net", "arch", "taps"),
    [("alex", "alexnet", [1, 4, 7, 9, 11]), ("vgg", "vgg16", [3, 8, 15, 22, 29])],
)
def test_lpips_with_imagenet_weights(net, arch, taps, shared_data, photographs):
    metric = Lpips(net, shared_data / "weights")
    distances = [metric(photographs, noisy(photographs, deviation)) for deviation in (0.0, 0.05, 0.1, 0.3)]
    assert distances[0].tolist() == [0] * 4
    assert all((near < far).all() for near, far in pairwise(distances))
    file = next((shared_data / "weights").glob(f"{arch}_features*.pth"))
    features = features_of(arch, torch.load(file, weights_only=True))
    expected = written_out_lpips(features, taps, net, photographs, noisy(photographs, 0.1))
    torch.testing.assert_close(distances[2], expected)


def test_the_sample_that_leaked_most_has_the_maximum_of_a_similarity_and_the_minimum_of_a_distance() -> None:
    titles = [MEASURES[extreme_of(name)].title for name in ("psnr", "rouge1", "mse")]
    assert [title.partition(" ")[0] for title in titles] == ["max", "max", "min"]
