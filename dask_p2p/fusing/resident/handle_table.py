"""The values that a rank of a resident gang has for its client."""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import numpy as np
from distributed.protocol.pickle import dumps, loads

from dask_p2p.fusing.planning.program import CallValue, Program
from dask_p2p.fusing.running.gang import on_device
from dask_p2p.fusing.running.quick_pickles import from_quick_form, quick_form
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.types import Array

_ITEM_BYTES = 8


class HandleTable:
    """The values of a rank's handles, by the index of the block in its array."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[str],  # names of the arrays that stand for the arguments
        blocks: Sequence[Any],  # of the program's inputs
        device: Host = HOST,
    ) -> None:
        self._device, self._call_values = device, [*program.call_values.values()]
        self._values: dict[int, tuple[Any, Any]] = {}  # by argument: the last message, and array
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

    def read(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the inputs of the program for a call, whose values come last.

        Arguments are numbers of handles, or values as `message_of` has them.
        """
        made = []
        for which, block in zip(self._inputs, self._blocks, strict=True):
            if which is None:
                made.append(block)
            elif type(argument := arguments[which[0]]) is int:
                made.append(self.handles[argument][which[1]])
            else:
                made.append(self._value(CallValue(which[0], "numpy"), argument))
        return [*made, *(self._value(each, arguments[each.number]) for each in self._call_values)]

    def _value(self, of_call: CallValue, message: Any) -> Any:
        last, array = self._values.get(of_call.number, (None, None))
        if last != message:
            form = loads(message) if isinstance(message, bytes) else from_quick_form(tuple(message))
            array = on_device(self._device, of_call, form)
            self._values[of_call.number] = message, array
        return array

    def add(self, first: int, made: Sequence[Sequence[Any]]) -> None:
        """Add the results of a call under successive numbers."""
        for number, (indices, blocks) in enumerate(zip(self._outputs, made, strict=True), first):
            self.handles[number] = dict(zip(indices, blocks, strict=True))

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop handles."""
        for number in numbers:
            self.handles.pop(number, None)


def message_of(value: Array) -> Any:
    """Return a small NumPy array as an argument of a call in a message."""
    return quick_form(value) or dumps(value)
