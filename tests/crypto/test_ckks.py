"""CKKS and BFV as addition of integers: exact at every load that they accept, and refusing the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tenseal as ts

from rayfed.crypto.lattice import SIGMAS, Lattice
from rayfed.errors import ProtectionError

SCHEMES = pytest.mark.parametrize("make", [Lattice.bfv, Lattice.ckks], ids=["bfv", "ckks"])
Make = Callable[[int, float], Lattice]
MOST = 2**26


def vectors(count: int, size: int = 5000) -> list[np.ndarray]:
    """Random ones, with the extremes in front: all at one end in one slot, at either end in others, zeros."""
    draw = np.random.default_rng(count)
    found = [draw.integers(-MOST, MOST + 1, size) for _ in range(count)]
    for i, vector in enumerate(found):
        vector[:100], vector[100:200], vector[200], vector[201] = MOST, 0, -MOST, MOST * (-1) ** i
    return found


@SCHEMES
@pytest.mark.parametrize("clients", [1, 2, 17, 100])
def test_sums_are_exact(make: Make, clients: int) -> None:
    lattice = make(clients * MOST, clients**0.5)
    key, terms = lattice.generate(), vectors(clients)
    total = lattice.encrypt(key, terms[0])
    for term in terms[1:]:
        total = lattice.add(total, lattice.encrypt(key, term))
    np.testing.assert_array_equal(lattice.decrypt(key, total), sum(terms))


@SCHEMES
@pytest.mark.parametrize("factors", [(100, 1), (1, 100), (37, 64)])
def test_multiples_are_exact(make: Make, factors: tuple[int, int]) -> None:
    lattice = make(sum(factors) * MOST, float(sum(factors)))
    key, (a, b) = lattice.generate(), vectors(2)
    left, right = (lattice.times(lattice.encrypt(key, v), f) for v, f in zip((a, b), factors, strict=True))
    np.testing.assert_array_equal(lattice.decrypt(key, lattice.add(left, right)), factors[0] * a + factors[1] * b)


@pytest.mark.parametrize("noise", [1.0, 10.0, 100.0])
def test_the_scale_of_ckks_leaves_its_noise_under_half_a_unit(noise: float) -> None:
    """What is decrypted before it is rounded: the noise that a ciphertext has, times that of the sum."""
    lattice = Lattice.ckks(MOST, noise)
    key, vector = lattice.generate(), np.zeros(200_000, np.int64)
    context = ts.context_from(key)
    parts = [ts.ckks_vector_from(context, c).decrypt() for c in lattice.encrypt(key, vector)]
    deviation = np.concatenate(parts).std()
    assert deviation * noise * SIGMAS < 0.5
    assert deviation * noise * SIGMAS > 0.05  # and no scale is wasted


@SCHEMES
def test_what_the_modulus_cannot_hold_is_refused(make: Make) -> None:
    with pytest.raises(OverflowError, match="bits too short"):
        make(2**46, 10.0)
    with pytest.raises(OverflowError, match="bits too short"):
        make(2**36, 2.0**20)


def test_a_ciphertext_is_at_most_eight_times_as_large_as_floats() -> None:
    size = 200_000
    for make, most in ((Lattice.ckks, 8), (Lattice.bfv, 4)):
        lattice = make(MOST * 10, 10**0.5)
        sent = sum(map(len, lattice.encrypt(lattice.generate(), np.arange(size))))
        assert sent <= most * 4 * size


@SCHEMES
def test_damaged_ciphertexts_are_refused_or_decrypt_to_something_else(make: Make) -> None:
    """SEAL finds some damage and not all, and takes any key: which is why sums carry tags."""
    lattice = make(MOST, 1.0)
    key, [vector] = lattice.generate(), vectors(1)
    whole = lattice.encrypt(key, vector)
    with pytest.raises(ProtectionError, match="cannot be read"):
        lattice.decrypt(key, (whole[0][:-1], *whole[1:]))
    with pytest.raises(ProtectionError, match="cannot be read"):
        lattice.add(whole, (b"", *whole[1:]))
    assert not np.array_equal(lattice.decrypt(lattice.generate(), whole), vector)


@SCHEMES
def test_adding_needs_no_secret(make: Make) -> None:
    """A server that was never given the key adds, and cannot decrypt what it adds."""
    clients, server = make(2 * MOST, 2.0), make(2 * MOST, 2.0)
    key, (a, b) = clients.generate(), vectors(2)
    total = server.add(clients.encrypt(key, a), clients.encrypt(key, b))
    np.testing.assert_array_equal(clients.decrypt(key, total), a + b)
    assert not ts.context_from(server._public).has_secret_key()
    with pytest.raises(ProtectionError, match="secret_key"):
        server.decrypt(server._public, total)
