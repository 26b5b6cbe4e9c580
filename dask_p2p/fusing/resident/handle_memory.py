"""The memory of a resident gang's handles, as the client counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isnan, prod

from dask.utils import format_bytes

from dask_p2p.errors import MemoryLimitError
from dask_p2p.fusing.planning.declared import Declared
from dask_p2p.geometry import block_shape
from dask_p2p.types import Key

_MOST_MEMORY = 0.8  # part of a worker's memory limit: beyond it Dask pauses the worker


class HandleMemory:
    """Counts the handles that are in use, and refuses calls whose results would not fit."""

    def __init__(
        self,
        results: Sequence[Declared],
        outputs: Sequence[Sequence[Iterable[Key]]],  # by rank and result: keys of the blocks
    ) -> None:
        self._bytes = [  # by rank and result
            [_bytes_of(of, keys) for of, keys in zip(results, of_rank, strict=True)]
            for of_rank in outputs
        ]
        self._results = len(results)
        self._live = Counter[int]()  # handles by number of the result

    def check(self, ranks: Iterable[tuple[str, str, int]]) -> None:
        """Refuse one more call if a worker's handles would take too much: `MemoryLimitError`.

        `ranks` are the addresses, tokens and memory limits by rank. A limit of 0 is none.
        """
        wanted, limits = Counter[str](), dict[str, int]()
        for (address, _, limit_bytes), each in zip(ranks, self._bytes, strict=False):
            wanted[address] += sum((self._live[n] + 1) * size for n, size in enumerate(each))
            limits[address] = limit_bytes
        for address, size_bytes in wanted.items():
            most_bytes = int(_MOST_MEMORY * limits[address])
            if most_bytes and size_bytes > most_bytes:
                raise MemoryLimitError(
                    f"expected handles of at most {format_bytes(most_bytes)} on {address}, got "
                    f"{format_bytes(size_bytes)} with the results of this call. Drop handles that "
                    f"are not needed: del u.",
                    size_bytes,
                    size_bytes - most_bytes,
                )

    def add_call(self) -> None:
        """Count the results of a call."""
        self._live.update(range(self._results))

    def drop(self, numbers: Iterable[int]) -> None:
        """Count handles that are not used any more, by their numbers."""
        self._live.subtract(number % self._results for number in numbers)


def _bytes_of(declared: Declared, keys: Iterable[Key]) -> int:
    """Return the size of some blocks; 0 where chunk sizes are unknown."""
    sizes = (prod(block_shape(declared.chunks, key[1:])) for key in keys if isinstance(key, tuple))
    return sum(0 if isnan(size) else int(size) * declared.dtype.itemsize for size in sizes)
