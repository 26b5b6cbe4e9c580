"""The values of one rank, and the memory that they share.

With Dask's tasks a function that overwrites its argument may change the values of other tasks, or
not: that depends on their order and their workers. A rank would always change them, and an attempt
that follows would find changed inputs. So functions of users get copies of arrays in use elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from dask.sizeof import sizeof
from numpy.lib.array_utils import byte_bounds

from dask_p2p.types import Array, Key, Kind

_SAMPLES = 10  # objects of an array whose sizes are looked at


class CountedValues(dict[Key, Any]):
    """Values by key, each until its last use."""

    def __init__(self, uses: Mapping[Key, int]) -> None:
        super().__init__()
        self._uses = dict(uses)

    def add_inputs(self, blocks: Iterable[tuple[Key, Any]]) -> None:
        """Add blocks that Dask has, too, or later runs of the program."""
        self.update(blocks)

    def use(self, key: Key) -> None:
        """Count one use of a value, and drop the value after its last one."""
        left = self._uses[key] = self._uses[key] - 1
        if not left:
            del self[key]


class LiveValues(CountedValues):
    """Values for functions that may overwrite them."""

    def __init__(
        self,
        uses: Mapping[Key, int],
        is_lent: Callable[[Any], bool] = lambda value: False,  # whether other ranks read a value
    ) -> None:
        super().__init__(uses)
        self._is_lent = is_lent
        self._inputs: set[int] = set()  # memory of blocks that Dask has
        self._live = defaultdict[int, int](int)  # by memory: number of values in it

    def add_inputs(self, blocks: Iterable[tuple[Key, Any]]) -> None:
        """See `CountedValues.add_inputs`."""
        for key, block in blocks:
            self[key] = block
            self._inputs.add(_memory(block))

    def __setitem__(self, key: Key, value: Any) -> None:
        super().__setitem__(key, value)
        self._live[_memory(value)] += 1

    def __delitem__(self, key: Key) -> None:
        self._live[_memory(self[key])] -= 1
        super().__delitem__(key)

    def to_overwrite(self, key: Key) -> Any:
        """Return a value, or a copy with the same strides if its memory is used elsewhere."""
        value = self[key]
        is_writable = isinstance(value, np.ndarray) and value.flags.writeable
        if not is_writable and not _is_on_gpu(value):
            return value
        memory = _memory(value)
        is_own = self._uses[key] == 1 and self._live[memory] == 1 and memory not in self._inputs
        return value if is_own and not self._is_lent(value) else _copy(value)


def _memory(value: Any) -> int:
    """Return a number for the memory of an array, the same for all views of it; 0 for others."""
    if not isinstance(value, np.ndarray):
        return id(value.data.mem) if _is_on_gpu(value) else 0
    if value.base is None:  # as most
        return id(value)
    while isinstance(value.base, np.ndarray):
        value = value.base
    return id(value if value.base is None else value.base)


def memory_bytes(values: Iterable[Any], kind: Kind) -> dict[int, int]:
    """Return the size of each memory that arrays of a kind share; of other values by identity."""
    sizes_bytes = dict[int, int]()
    for value in values:
        if _is_on_gpu(value):
            if kind == "cupy":
                sizes_bytes[_memory(value)] = int(value.data.mem.size)
        elif kind != "numpy":
            continue
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            base = value
            while isinstance(base.base, np.ndarray):
                base = base.base
            sizes_bytes[_memory(value)] = base.nbytes
        else:
            sizes_bytes[id(value)] = size_of(value)
    return sizes_bytes


def size_of(value: Any) -> int:
    """Return the size of a value; about that of an array's Python objects."""
    if type(value) is not np.ndarray:
        return int(sizeof(value))
    if not value.dtype.hasobject or not value.size:
        return int(value.nbytes)
    sample = value.flat[:: -(-value.size // _SAMPLES)]
    return int(value.nbytes + value.size * sum(map(sizeof, sample)) / len(sample))


def _is_on_gpu(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "cupy" and hasattr(value, "data")


def _copy(array: Array) -> Array:
    """Return a copy of an array whose sums are rounded alike: with the same strides."""
    if type(array) is not np.ndarray or array.dtype.hasobject:
        return array.copy(order="K")
    low, high = byte_bounds(array)
    start = array.__array_interface__["data"][0] - low
    memory = np.empty(high - low, np.uint8)
    made: Array = np.ndarray(array.shape, array.dtype, memory, start, array.strides)
    made[...] = array
    return made
