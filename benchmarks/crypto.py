"""Encryption of an update: packed Paillier against naive phe, CKKS and BFV against floats, a round with and without.

    python -m benchmarks.crypto [--values 15000] [--clients 3] [--sample 60] [--round] [--data mnist:PATH]

Naive phe encrypts, multiplies, adds and decrypts value by value, as FedBoosting's code does; `--sample` of its values
are timed and scaled up. All sides take turns on one core in one run, so compare the ratios. `--round` plays rounds of
ten clients on two actors instead, with and without encryption.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import reduce
from time import perf_counter, process_time
from typing import Any

import numpy as np
import phe
import torch

from actors.executor import on_ray
from rayfed import scenario as scenarios
from rayfed.crypto.encryptor import Encryptor, Keys, Load
from rayfed.crypto.paillier import KeyPair
from rayfed.models.build import build_model
from rayfed.protections.bfv import Bfv
from rayfed.protections.ckks import Ckks
from rayfed.protections.paillier import Paillier, PaillierScheme, parsed
from rayfed.runs import runner
from rayfed.simulation.progress import Progress
from rayfed.update import Update

WEIGHT = 33
"""Of every client; three of them sum to 99, which takes seven guard bits."""


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, which others on the machine cannot lengthen as they do those of the wall."""
    began = process_time()
    result = act()
    return process_time() - began, result


def naive(keys: KeyPair, values: list[float], clients: int) -> dict[str, float]:
    """Seconds and bytes a value of phe on floats."""
    public = phe.PaillierPublicKey(int(keys.public.n))
    private = phe.PaillierPrivateKey(public, int(keys.p), int(keys.q))
    encrypt, first = timed(lambda: [public.encrypt(v) for v in values])
    weigh, encrypted = timed(lambda: [c * WEIGHT for c in first])
    add, total = timed(lambda: [a + b for a, b in zip(encrypted, encrypted, strict=True)])
    decrypt, _ = timed(lambda: [private.decrypt(c) for c in total])
    size = sum((c.ciphertext(be_secure=False).bit_length() + 7) // 8 for c in first)
    spent = {"encrypt": encrypt, "decrypt": decrypt, "bytes": float(size)}
    spent["end to end"] = clients * (encrypt + weigh) + (clients - 1) * add + decrypt
    return {name: value / len(values) for name, value in spent.items()}


def packed(encryptor: Encryptor, pair: bytes, values: np.ndarray, clients: int, way: str) -> dict[str, float]:
    """Seconds and bytes a value of the engine: weighed, encrypted, added, decrypted."""
    scheme, code = encryptor.scheme, encryptor.code
    assert isinstance(scheme, PaillierScheme)
    assert scheme.lanes is not None
    keys, lanes = parsed(pair)[0], scheme.lanes
    ones = np.ones(len(values))
    tabulated = keys.tabulated() if way == "table" else None

    def encrypt() -> list[Any]:
        plain = lanes.pack(WEIGHT * (code.encode(values, ones) + scheme.offset))
        if way == "plain":
            return keys.public.encrypt(plain)
        return keys.encrypt(plain, tabulated(len(plain)) if tabulated else None)

    seconds, encrypted = timed(encrypt)
    add, total = timed(lambda: keys.public.add(encrypted, encrypted))
    decrypt, numbers = timed(lambda: lanes.unpack([int(m) for m in keys.decrypt(total)], len(values)))
    found = code.decode(numbers - 2 * WEIGHT * scheme.offset, ones) / (2 * WEIGHT)
    assert np.abs(found - values).max() <= 1 / (2**16 - 2) * (1 + 1e-9)
    spent = {"encrypt": seconds, "decrypt": decrypt, "bytes": float(len(encrypted) * 512)}
    spent["end to end"] = clients * seconds + (clients - 1) * add + decrypt
    return {name: value / len(values) for name, value in spent.items()}


def paillier(count: int, clients: int, sample: int) -> None:
    values = np.random.default_rng(0).uniform(-1, 1, count)
    encryptor = Paillier(bits=16).encryptor(Load(clients, WEIGHT * clients))
    pair = encryptor.scheme.generate(bytes(32))
    slow = naive(parsed(pair)[0], values[:sample].tolist(), clients)
    print(f"Paillier, 2048 bits, {count} values of 16 bits, {clients} clients: naive phe over packed")
    for way in ("plain", "crt", "table"):
        fast = packed(encryptor, pair, values, clients, way)
        print(f"  {way:6}" + "".join(f"  {name} {slow[name] / fast[name]:.0f}x" for name in fast), end="")
        print(f"  ({1e6 * fast['encrypt']:.0f} us and {fast['bytes']:.1f} bytes a value)")


def lattices(count: int, clients: int) -> None:
    g = torch.Generator().manual_seed(0)
    sent = [Update(c, 0, {"w": torch.rand(count, generator=g) * 2 - 1}, {}, 1, 0.0) for c in range(clients)]
    for name, protection in (("CKKS", Ckks()), ("BFV", Bfv())):
        encryptor = protection.encryptor(Load(clients, clients))
        keys = Keys(bytes(32), encryptor.scheme.generate(bytes(32)))
        encrypt, encrypted = timed(lambda: [encryptor.encrypt(keys, u, 1) for u in sent])  # noqa: B023
        add, total = timed(lambda: encryptor.add(encrypted[0], encrypted[1]))  # noqa: B023
        for other in encrypted[2:]:
            total = encryptor.add(total, other)
        decrypt, (tensors, _, weight) = timed(lambda: encryptor.open(keys, total))  # noqa: B023
        mean = torch.stack([u.tensors["w"].double() for u in sent]).mean(0)
        error = float((tensors["w"] / weight - mean).abs().max())
        print(
            f"{name}, {count} values, {clients} clients: {encrypted[0].sent_bytes / 4 / count:.2f}x float32, encrypt "
            f"{encrypt / clients:.2f} s, add {add:.2f} s, open {decrypt:.2f} s, error {error:.1e}"
        )


def overhead() -> None:
    """What encryption adds to a round of ten clients with 6,000 samples each, as MNIST has them, on two cores."""
    model = build_model("lenet", {}, (1, 28, 28), 10, 0, None)
    weights = {name: w.detach() / 10 for name, w in model.named_parameters()}
    sent = [Update(c, 0, weights, {}, 6000, 0.0) for c in range(10)]
    protections = {"paillier": Paillier(), "paillier, no table": Paillier(table=False), "ckks": Ckks(), "bfv": Bfv()}
    for name, protection in protections.items():
        encryptor = protection.encryptor(Load(10, 60_000))
        keys = Keys(bytes(32), encryptor.scheme.generate(bytes(32)))
        encryptor.encrypt(keys, sent[0], 6000)  # makes the table
        encrypt, encrypted = timed(lambda: [encryptor.encrypt(keys, u, 6000) for u in sent])  # noqa: B023
        add, total = timed(lambda: reduce(encryptor.add, encrypted))  # noqa: B023
        opening, _ = timed(lambda: encryptor.open(keys, total))  # noqa: B023
        size = encrypted[0].sent_bytes / sum(4 * w.numel() for w in weights.values())
        print(
            f"LeNet on MNIST, ten clients, {name}: {encrypt / 2 + add + opening:.2f} s more on two cores (encrypt all "
            f"{encrypt:.2f}, add {add:.2f}, open {opening:.2f}), {size:.1f}x float32"
        )


def rounds(data: str) -> None:
    """Seconds of the second round of ten clients on two actors, arm by arm; the first one builds models and tables."""
    name, _, root = data.partition(":")
    where = f"{{name: {name}, root: {root}}}" if root else f"{{name: {name}, size: 28}}"
    spent = {}
    for arm, protection in {"plain": "null", "paillier": "paillier", "no table": "{name: paillier, table: false}",
                            "ckks": "ckks", "bfv": "bfv"}.items():  # fmt: skip
        scenario = scenarios.parse(
            f"""
            name: crypto
            data: {where}
            model: lenet
            training: {{steps: 10}}
            federation: {{rounds: 3, clients: 10, evaluate_every: 3, protection: {protection}}}
            resources: {{clients: {{actors: 2, num_cpus: 1}}}}
            """
        )
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            runner.launch(scenario, folder, on_ray(), clock)
        spent[arm] = clock.seconds[1]
        print(f"LeNet, ten clients of {data}, {arm}: {spent[arm]:.2f} s a round, {spent[arm] - spent['plain']:+.2f} s")


class Clock(Progress):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def ready(self, first_round: int) -> None:
        self._began = perf_counter()

    def round_done(self, *rows: Any) -> None:
        now = perf_counter()
        self.seconds.append(now - self._began)
        self._began = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=15_000)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--round", action="store_true")
    parser.add_argument("--data", default="digits")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.round:
        rounds(given.data)
        return
    paillier(given.values, given.clients, given.sample)
    lattices(270_000, 10)
    overhead()


if __name__ == "__main__":
    main()
