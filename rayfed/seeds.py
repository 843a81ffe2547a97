"""Random number generators: one for each purpose, keyed by (seed, purpose, round, client, ...).

Keys, not a shared stream: what one client draws cannot depend on who ran before it, on which actor, or whether a call
was repeated after a crash. All bits of a key count: it is hashed to 256 bits, from which neither the seed nor another
purpose's bits can be told but by trying seeds, and the whole state of a generator is filled from these.

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
        ("left", "<i4"),  # numbers before the state is renewed, plus 1
        ("seeded", "<i4"),
        ("next", "<u8"),
        ("words", "<u8", 624),
        ("normal", "V40"),  # a normal number kept for the next call: none
    ]
)
"""What `torch.Generator.set_state` takes on the CPU (`CPUGeneratorImplStateLegacy` in ATen)."""
_FRESH = np.zeros(1, _TORCH_STATE)
_FRESH["left"] = _FRESH["seeded"] = 1


STREAMS = 2
"""Version of the random numbers that a seed gives; a run begun with another is not continued: its data differ."""


def encoded(*parts: KeyPart) -> bytes:
    """Return an unambiguous byte string of these parts: each with its type and its length."""
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


def derived(*key: KeyPart) -> bytes:
    """Derive 32 bytes from a key, for one purpose."""
    return hmac.digest(b"rayfed", encoded(*key), "sha256")


def number(*key: KeyPart) -> int:
    """Derive a number of 256 bits from a key; see `derived`."""
    return int.from_bytes(derived(*key))


def torch_generator(*key: KeyPart) -> torch.Generator:
    """Return a CPU generator for one purpose; the same key gives the same stream on every machine."""
    return filled(torch.Generator(), derived(*key))


def filled(generator: torch.Generator, key: bytes) -> torch.Generator:
    """Seed all 624 words of a CPU generator from a key, and return it; `manual_seed` would use 32 bits.

    Its `initial_seed`, which nothing is drawn from, tells it from others.
    """
    state, drawn = _FRESH.copy(), shake_256(key).digest(4 * 624 + 8)
    state["words"], state["seed"] = np.frombuffer(drawn, "<u4", 624), int.from_bytes(drawn[-8:])
    generator.set_state(torch.from_numpy(state.view(np.uint8)))
    return generator


def numpy_generator(*key: KeyPart) -> np.random.Generator:
    """Return a NumPy generator for one purpose, as `torch_generator` does."""
    place, secret = divmod(number(*key), 2**128)
    return np.random.Generator(np.random.Philox(counter=place, key=secret))


@contextmanager
def global_stream(*key: KeyPart, cuda: bool = False) -> Iterator[None]:
    """Seed PyTorch's global generators from a key during the block, for code that draws from no other.

    They go on as before afterwards. With `cuda` those of the GPUs are meant, too, which take 64 bits of the key.
    """
    with torch.random.fork_rng(devices=None if cuda else []):
        if cuda:
            torch.manual_seed(number(*key, "cuda") % 2**63)
        filled(torch.default_generator, derived(*key))
        yield


def drawn(generator: torch.Generator) -> bytes:
    """Draw a key of 256 bits from a generator, to seed an independent stream."""
    return torch.randint(256, (32,), generator=generator, dtype=torch.uint8).numpy().tobytes()


def again(repeat: int) -> tuple[int, ...]:
    """Return the key's suffix for a repeat; empty for the first, so that it equals a run without repeats."""
    return (repeat,) if repeat else ()
