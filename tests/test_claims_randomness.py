"""What is claimed of random numbers: every bit of a seed counts, no two purposes share a stream, secrets stay secret."""

from __future__ import annotations

from zlib import crc32

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
