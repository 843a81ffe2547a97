"""Create random number generators, one for each purpose, from a key (seed, purpose, round, client, ...).

With keys instead of a shared stream, a client's random numbers do not depend on other clients, on the actor, or on
repeated calls after a crash. A key is hashed to 256 bits, which fill the whole state of a generator. An attacker that
knows these bits can find the seed, or the bits of another purpose, only by trying seeds.

Sources: HMAC-SHA-256 as in HKDF's extraction, RFC 5869; SHAKE-256, FIPS 202; Matsumoto and Nishimura 1998 (MT19937);
Salmon et al. 2011 (Philox).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import shake_256
from operator import index

import numpy as np
import torch

KeyPart = int | str | bytes

_TORCH_STATE = np.dtype(
    [
        ("seed", "<u8"),
        ("left", "<i4"),  # 1 + count of numbers left before the state is renewed
        ("seeded", "<i4"),
        ("next", "<u8"),
        ("words", "<u8", 624),
        ("normal", "V40"),  # the normal number stored for the next call; here none
    ]
)
"""Layout of the state for `torch.Generator.set_state` on the CPU (`CPUGeneratorImplStateLegacy` in ATen)."""
_FRESH = np.zeros(1, _TORCH_STATE)
_FRESH["left"] = _FRESH["seeded"] = 1


STREAMS = 2
"""Version of the random streams. A run that was started with another version cannot be continued."""


def encode_key(*parts: KeyPart) -> bytes:
    """Encode the parts of a key as an unambiguous byte string, each with its type and length."""
    return b"".join(_encoded(part) for part in parts)


def _encoded(part: KeyPart) -> bytes:
    if isinstance(part, str):
        kind, content = b"s", part.encode()
    elif isinstance(part, bytes):
        kind, content = b"b", part
    else:
        number = index(part)
        kind, content = b"i", number.to_bytes(number.bit_length() // 8 + 1, signed=True)
    return kind + len(content).to_bytes(8) + content


def derive_bytes(*key: KeyPart) -> bytes:
    """Derive 32 pseudorandom bytes from a key, with HMAC-SHA-256."""
    return hmac.digest(b"rayfed", encode_key(*key), "sha256")


def derive_integer(*key: KeyPart) -> int:
    """Derive a pseudorandom integer of 256 bits from a key; see `derive_bytes`."""
    return int.from_bytes(derive_bytes(*key))


def torch_generator(*key: KeyPart) -> torch.Generator:
    """Return a PyTorch CPU generator for a key. The same key gives the same stream on every machine."""
    return seed_generator(torch.Generator(), derive_bytes(*key))


def seed_generator(generator: torch.Generator, key: bytes) -> torch.Generator:
    """Seed all 624 words of a CPU generator from a key, and return the generator. `manual_seed` uses only 32 bits.

    Its `initial_seed` only identifies the generator; the random numbers do not depend on it.
    """
    state, drawn = _FRESH.copy(), shake_256(key).digest(4 * 624 + 8)
    state["words"], state["seed"] = np.frombuffer(drawn, "<u4", 624), int.from_bytes(drawn[-8:])
    generator.set_state(torch.from_numpy(state.view(np.uint8)))
    return generator


def numpy_generator(*key: KeyPart) -> np.random.Generator:
    """Return a NumPy generator for a key. The same key gives the same stream on every machine."""
    place, secret = divmod(derive_integer(*key), 2**128)
    return np.random.Generator(np.random.Philox(counter=place, key=secret))


@contextmanager
def global_stream(*key: KeyPart, cuda: bool = False) -> Iterator[None]:
    """Seed PyTorch's global CPU generator from a key within the block, for code that cannot use another generator.

    The generator's state is restored after the block. With `cuda`, also seed the GPU generators (63 bits of the key).
    """
    with torch.random.fork_rng(devices=None if cuda else []):
        if cuda:
            torch.manual_seed(derive_integer(*key, "cuda") % 2**63)
        seed_generator(torch.default_generator, derive_bytes(*key))
        yield


def sample_key(generator: torch.Generator) -> bytes:
    """Sample a key of 256 bits from a generator, to seed an independent random stream."""
    return torch.randint(256, (32,), generator=generator, dtype=torch.uint8).numpy().tobytes()


def repeat_suffix(repeat: int) -> tuple[int, ...]:
    """Return the suffix of a random key for a repeat; empty for repeat 0, which equals a run without repeats."""
    return (repeat,) if repeat else ()
