"""Numbered pieces of one memory, handed out and taken back by reference count.

All of it is arithmetic on the host: the memory itself is a tensor of the model's, and a number is
an index into it. `pages` and `slots` say which. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perilune.core.errors import ConfigError
from perilune.engine.errors import PoolFullError


class CountedPool:
    """The single owner of the numbers `num_reserved` to `size - 1`.

    A number is free, or has one reference or more. Each reference is given up by one `release`;
    whoever holds one may rely on the piece not being handed out to anybody else.
    """

    kind = "piece"

    def __init__(
        self,
        size: int,
        *,
        num_reserved: int = 0,
        on_free: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`on_free` is called with the numbers that have just become free: tests poison them.

        Raises:
            ConfigError: nothing is left to hand out.
        """
        if size <= num_reserved:
            raise ConfigError(f"a pool needs more than {num_reserved} {self.kind}s, not {size}")
        self.size = size
        self._num_reserved = num_reserved
        self._count = [0] * size
        # Last in, first out: what was freed last is used again first, and a stale user shows.
        self._free = list(range(size - 1, num_reserved - 1, -1))
        self.on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.size - self._num_reserved - len(self._free)

    @property
    def capacity(self) -> int:
        """How many can be in use at once."""
        return self.size - self._num_reserved

    def count(self, number: int) -> int:
        """References to `number`; 0: free or reserved."""
        return self._count[number]

    def allocate(self, num: int) -> list[int]:
        """`num` free numbers with one reference each, the caller's; all of them or none.

        Raises:
            PoolFullError: fewer are free.
        """
        if num > len(self._free):
            raise PoolFullError(self.kind, wanted=num, free=len(self._free))
        if num <= 0:
            return []
        taken = self._free[: -num - 1 : -1]
        del self._free[-num:]
        for number in taken:
            self._count[number] = 1
        return taken

    def share(self, numbers: Sequence[int]) -> None:
        """One more reference to each.

        Raises:
            ValueError: one of them is not in use; nothing is shared.
        """
        self.check_used(numbers)
        for number in numbers:
            self._count[number] += 1

    def release(self, numbers: Sequence[int]) -> None:
        """Gives up one reference to each; the last one frees.

        Raises:
            ValueError: one of them is not in use.
        """
        freed = []
        for number in numbers:
            count = self._count[number] if number >= 0 else 0
            if count == 0:
                raise ValueError(f"{self.kind} {number} is not in use")
            self._count[number] = count - 1
            if count == 1:
                freed.append(number)
        self._free += freed
        if freed and self.on_free is not None:
            self.on_free(freed)

    def check(self, expected: Mapping[int, int] | None = None) -> None:
        """Asserts that every number is free or counted, never both.

        `expected`: the references that the callers know of, of every number in use.
        """
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self.kind} is free twice"
        for number, count in enumerate(self._count):
            is_owned = number >= self._num_reserved
            assert count >= 0, f"{self.kind} {number} has {count} references"
            assert (number in free) == (is_owned and count == 0), f"{self.kind} {number} is lost"
            assert is_owned or count == 0, f"reserved {self.kind} {number} was handed out"
        if expected is not None:
            counted = {number: count for number, count in enumerate(self._count) if count}
            assert counted == {n: c for n, c in expected.items() if c}, (
                f"{self.kind}s have {counted} references, but {dict(expected)} are held"
            )

    def check_used(self, numbers: Sequence[int]) -> None:
        """Raises:
        ValueError: one of them is free, reserved or no number of this pool.
        """
        for number in numbers:
            if not 0 <= number < self.size or self._count[number] == 0:
                raise ValueError(f"{self.kind} {number} is not in use")
