"""Random numbers by address: the n-th draw of a seed, without a generator's state."""

from __future__ import annotations

import secrets
from hashlib import blake2b


def draw_seed() -> int:
    """A seed for a request that gave none: 63 bits from the operating system."""
    return secrets.randbits(63)


def uniform(seed: int, index: int) -> float:
    """Draw `index` of `seed`: a multiple of 2^-53 in [0, 1), the same on every machine.

    The number depends on its two arguments alone, so what else is in a batch cannot change it. It
    is the top of BLAKE2b's digest of both: neighbouring seeds are as unrelated as distant ones.
    """
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
