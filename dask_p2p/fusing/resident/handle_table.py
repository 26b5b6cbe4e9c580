"""The values that a rank of a resident gang has for its client."""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import numpy as np
from distributed.protocol.pickle import dumps, loads

from dask_p2p.fusing.planning.program import Program
from dask_p2p.types import Array

_ITEM_BYTES = 8


class HandleTable:
    """The values of a rank's handles, by the index of the block in its array."""

    def __init__(self, program: Program, arguments: Sequence[str], blocks: Sequence[Any]) -> None:
        self._inputs: list[tuple[int, Any] | None] = []  # argument and index; None: a constant
        self._blocks = list(blocks)  # of the inputs
        self._outputs = [[key[1:] for key in keys] for keys in program.outputs]
        #: Blocks by handle. Argument n has the number -1 - n.
        self.handles: dict[int, dict[Any, Any]] = {}
        numbers = {name: number for number, name in enumerate(arguments)}
        for key, block in zip(program.inputs, blocks, strict=True):
            number = numbers.get(key[0]) if isinstance(key, tuple) else None
            self._inputs.append(None if number is None else (number, key[1:]))
            if number is not None:
                self.handles.setdefault(-1 - number, {})[key[1:]] = block

    def state(self) -> list[Array]:
        """Return the handles as arrays of bytes, without those of the arguments."""
        handles = {number: blocks for number, blocks in self.handles.items() if number >= 0}
        buffers: list[PickleBuffer] = []
        parts = [dumps(handles, buffer_callback=buffers.append), *(each.raw() for each in buffers)]
        sizes = np.array([len(parts), *(len(each) for each in parts)], np.int64)
        return [sizes.view(np.uint8), *(np.asarray(memoryview(each)) for each in parts)]

    def restore(self, state: memoryview) -> None:
        """Take the handles of a state."""
        (count,) = np.frombuffer(state, np.int64, 1)
        sizes = np.frombuffer(state, np.int64, count, _ITEM_BYTES)
        start, parts = (1 + len(sizes)) * _ITEM_BYTES, []
        for size in sizes:
            parts.append(bytearray(state[start : start + size]))  # a copy: functions may write
            start += size
        self.handles |= loads(parts[0], buffers=parts[1:])

    @property
    def results(self) -> int:
        """Number of results of a call."""
        return len(self._outputs)

    def has_one_dtype_by_shape(self) -> bool:
        """Return whether all handles with blocks of the same shapes have the same dtypes, too."""
        dtypes: dict[Any, Any] = {}
        for blocks in self.handles.values():
            shapes = tuple((index, block.shape) for index, block in blocks.items())
            found = [block.dtype for block in blocks.values()]
            if dtypes.setdefault(shapes, found) != found:
                return False
        return True

    def read(self, handles: Sequence[int]) -> list[Any]:
        """Return the inputs of the program for a call."""
        return [
            block if which is None else self.handles[handles[which[0]]][which[1]]
            for which, block in zip(self._inputs, self._blocks, strict=True)
        ]

    def add(self, first: int, made: Sequence[Sequence[Any]]) -> None:
        """Add the results of a call under successive numbers."""
        for number, (indices, blocks) in enumerate(zip(self._outputs, made, strict=True), first):
            self.handles[number] = dict(zip(indices, blocks, strict=True))

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop handles."""
        for number in numbers:
            self.handles.pop(number, None)
