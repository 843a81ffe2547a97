"""What is claimed of random numbers: every bit of a seed counts, and no two purposes share a stream."""

from __future__ import annotations

import hashlib
from zlib import crc32

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from rayfed import scenario as scenarios
from rayfed import seeds
from rayfed.crypto.keys import derive
from rayfed.errors import ScenarioError
from rayfed.models.build import build_model
from rayfed.scenario import Training
from rayfed.training.local import batches

FAR_APART = [5, 5 + 2**32, 5 + 2**48, 5 + 2**62]
"""Seeds with the same low 32 bits, which is all that `torch.Generator.manual_seed` reads on the CPU."""


def weights_drawn(seed: int) -> list[float]:
    return parameters_to_vector(build_model("mlp", {}, (1, 4, 4), 3, seed).parameters()).tolist()


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: torch.rand(4, generator=seeds.torch_generator(seed)).tolist(),
        lambda seed: torch.rand(4, generator=seeds.torch_generator(seed, "client", 0, 3)).tolist(),
        lambda seed: seeds.numpy_generator(seed).random(4).tolist(),
        lambda order: next(iter(batches(50, Training(), order))).tolist(),
        lambda order: next(iter(batches(50, Training(sampling="poisson"), order))).tolist(),
        weights_drawn,
    ],
    ids=["torch", "torch of a purpose", "numpy", "shuffled batches", "Poisson batches", "first weights"],
)
def test_every_bit_of_a_seed_counts(draw) -> None:  # type: ignore[no-untyped-def]
    assert len({tuple(draw(seed)) for seed in FAR_APART}) == len(FAR_APART)


def test_seeds_that_the_tables_could_not_hold_are_refused() -> None:
    text = "name: t\nfederation: {rounds: 1, clients: 2}\nseed: "
    assert scenarios.parse(f"{text}{2**63 - 1}").seed == 2**63 - 1
    for seed in (2**63, 5 + 2**64, -1):
        with pytest.raises(ScenarioError, match="seed"):
            scenarios.parse(f"{text}{seed}")


DISTINCT = [
    ("buckeroo",), ("plumless",),  # of the same CRC-32
    (crc32(b"buckeroo"),), (str(crc32(b"buckeroo")),),
    (1,), (1, 0), (1, 0, 0), ("1",), ("1", "0"), ("10",), (1, ""), ("", 1),
    ("ab", "c"), ("a", "bc"), ("a\x00b",), ("a", "b"), (0,), (256,), (65536,), (255,), (128,),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", "numpy", "crypto"])
def test_no_two_keys_share_a_stream(kind: str) -> None:
    def drawn(key: tuple[int | str, ...]) -> bytes:
        if kind == "crypto":
            return derive(b"secret", *key)
        if kind == "numpy":
            return seeds.numpy_generator(*key).bytes(16)
        return torch.rand(4, generator=seeds.torch_generator(*key)).numpy().tobytes()

    assert len({drawn(key) for key in DISTINCT}) == len(DISTINCT)


def test_many_seeds_have_as_many_streams() -> None:
    """Of 32 bits, 105,000 streams were enough to meet one twice."""
    first, second = (torch.rand(4, generator=seeds.torch_generator(seed)) for seed in (41_780, 104_948))
    assert not torch.equal(first, second)


def test_a_generator_is_the_mersenne_twister_of_all_of_its_words() -> None:
    """The same words in numpy's MT19937 give the same numbers, so what a key fills is the state that counts."""
    generator, key = torch.Generator(), seeds.derived(3, "oracle")
    seeds.filled(generator, key)
    oracle = np.random.MT19937()
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * 624), np.uint32)
    oracle.state = {"bit_generator": "MT19937", "state": {"key": words.copy(), "pos": 624}}
    ours = torch.rand(2000, generator=generator)
    assert torch.equal(ours, torch.from_numpy((oracle.random_raw(2000) % 2**24 / 2**24).astype(np.float32)))


def test_the_global_stream_is_lent_and_given_back() -> None:
    torch.manual_seed(1)
    undisturbed = torch.rand(3)
    torch.manual_seed(1)
    with seeds.global_stream(7, "lent", cuda=True):
        lent = torch.rand(3)
    assert torch.equal(torch.rand(3), undisturbed)
    assert torch.equal(lent, torch.rand(3, generator=seeds.torch_generator(7, "lent")))
    with seeds.global_stream(7 + 2**32, "lent"):
        assert not torch.equal(torch.rand(3), lent)
