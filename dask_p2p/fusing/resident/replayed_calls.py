"""Calls of a resident gang that GPUs replay, without Python code on hosts.

A short call takes its hosts longer than its GPUs: messages, the launches of kernels, functions. So
after some calls each rank captures one as a CUDA graph, if the code of all functions shows that
they depend on their arguments alone. All ranks decide alike, in messages: whether all can capture a
call, have done so, and have got the values of their functions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pickle import PickleBuffer
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import numpy as np
from dask.task_spec import GraphNode
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.utils import pack_frames_prelude, unpack_frames

from dask_p2p import tuning
from dask_p2p.backends import memory_order
from dask_p2p.backends.kernels.copies import whole_piece
from dask_p2p.errors import SectionError
from dask_p2p.fusing.planning.sizes import AssembleStep, CallValue, Program, Superstep
from dask_p2p.fusing.running.gang import ProgramContext, Runner, exchanging, on_device
from dask_p2p.fusing.running.messages import Messages, Packing, from_quick_form, text_of
from dask_p2p.fusing.running.program import ReadyProgram, parts_of
from dask_p2p.sections.exchange.device import HOST, Host, Lending, SourcePieces
from dask_p2p.sections.gang.worker import Progress
from dask_p2p.sections.gpu.device import (
    Gpu,
    GraphLending,
    can_wait_for_peers,
    captured,
    own_gpu,
    share_gpus,
)
from dask_p2p.sections.iterate.functions import is_constant, is_replayable
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.types import Array, Key

_LOG = logging.getLogger(__name__)
_PATTERN = 0x3A  # byte of inputs during the capture: see `_CallGraph`
_VERIFIED_CALLS = 2
_CAN, _CANNOT = b"\1", b"\0"

_T = TypeVar("_T")


class ReplayedCalls:
    """The calls of one rank."""

    def __init__(
        self,
        ctx: ProgramContext,
        ready: ReadyProgram,
        table: HandleTable,  # its handles, which become arguments of later calls
        run: Callable[[Sequence[Any], int], list[list[Any]]],  # from inputs and number of the call
    ) -> None:
        self._ctx, self._ready, self._table, self._run = ctx, ready, table, run
        self._calls = 0
        self._replay: _CallGraph | None = None

    def call(self, blocks: Sequence[Any], number: int) -> list[list[Any]]:
        count, self._calls = self._calls, self._calls + 1
        first, gpu = tuning.current.replay_after_calls, self._ctx.device
        if self._replay is not None and count >= first + _VERIFIED_CALLS:
            return self._replay(blocks)
        outputs = self._run(blocks, number)
        if not isinstance(gpu, Gpu):
            return outputs
        if count == first:
            self._replay = self._captured(gpu, blocks, outputs)
        if self._replay is not None and not self._all(self._replay.is_right(blocks, outputs)):
            _LOG.debug("A replayed call has other values: calls go on one by one.")
            self._replay = None
        return outputs

    def _captured(
        self, gpu: Gpu, blocks: Sequence[Any], outputs: Sequence[Sequence[Any]]
    ) -> _CallGraph | None:
        """Return a graph of a call; None if a rank cannot capture it. A call of all ranks."""
        supersteps = self._agreed(self._can_begin(gpu, blocks, outputs))
        if supersteps is None:
            return None
        lending = GraphLending(gpu, self._ctx.connections)
        runner = GraphRunner(self._ctx, self._ready, lending, supersteps)
        replay = _try(lambda: _CallGraph(gpu, lending, blocks))
        if not self._all(lending.is_complete and replay is not None) or replay is None:
            return None
        has_captured = _try(lambda: replay.capture(runner))
        runner.skip()
        return replay if self._all(has_captured is not None) else None

    def _can_begin(self, gpu: Gpu, blocks: Sequence[Any], outputs: Sequence[Sequence[Any]]) -> bool:
        """Return whether this rank can capture a call, and a call is short."""
        blocks = [*blocks, *(block for array_blocks in outputs for block in array_blocks)]
        handles = [b for of_handle in self._table.handles.values() for b in of_handle.values()]
        if not gpu.has_windows or not can_wait_for_peers():
            return False
        if not all(map(gpu.holds, (*blocks, *handles))):
            return False
        size_bytes, program = sum(int(block.nbytes) for block in blocks), self._ready.program
        return (
            size_bytes < tuning.current.captured_bytes
            and self._table.has_one_dtype_by_shape()
            and not any(isinstance(literal, np.ndarray) for literal in program.literals.values())
            and all(is_replayable_step(step) for s in program.supersteps for step in s.steps)
        )

    def _agreed(self, can_begin: bool) -> frozenset[int] | None:
        """Return the supersteps with an exchange of any rank.

        None if a rank cannot begin, or if ranks share a GPU.
        """
        exchanging_here, count = exchanging(self._ready.program), len(self._ready.steps)
        supersteps = bytes(n in exchanging_here for n in range(count))
        data = b"".join((supersteps, _CAN if can_begin else _CANNOT, own_gpu()))
        gathered = self._ctx.connections.gather("begin of captured calls", data)
        messages = [bytes(message) for message in gathered]
        can_all = all(message[count:].startswith(_CAN) for message in messages)
        if not can_all or share_gpus([message[count:] for message in messages]):
            return None
        return frozenset(n for n in range(count) if any(message[n] for message in messages))

    def _all(self, is_ready: bool) -> bool:
        vote = _CAN if is_ready else _CANNOT
        votes = self._ctx.connections.gather("captured calls", vote)
        return all(bytes(vote) == _CAN for vote in votes)


class _CallGraph:
    """A call of a program as a CUDA graph.

    The graph has arrays of its own for inputs and outputs. During the capture the inputs have a
    pattern in place of values. So a function that works on another stream, which the graph misses,
    leaves other results there than those of the first call that is verified.
    """

    _calls = 0

    _graph: Callable[[], None]

    def __init__(self, gpu: Gpu, lending: GraphLending, blocks: Sequence[Array]) -> None:
        self._gpu, self._lending = gpu, lending
        self._inputs = [self._patterned(block) for block in blocks]
        self._last: list[Any] = [None] * len(blocks)  # the blocks that the inputs are copies of
        self._outputs: list[list[Array]] = []

    def capture(self, runner: GraphRunner) -> bool:
        """Capture a call; return True. Raises any error of its functions, or of CUDA."""
        self._graph = captured(self._gpu, lambda: self._outputs.extend(runner.run(self._inputs)))
        if not all(self._gpu.holds(block) for array in self._outputs for block in array):
            raise SectionError("expected outputs in GPU memory")
        return True

    def __call__(self, blocks: Sequence[Array]) -> list[list[Array]]:
        for number, block in enumerate(blocks):
            if block is not self._last[number]:
                self._copy(self._inputs[number], block)
                self._last[number] = block
        self._lending.flush()
        self._launch()
        copies = [
            [_in_order_of(block, partial(self._gpu.empty, dtype=block.dtype)) for block in array]
            for array in self._outputs
        ]
        for array, source in zip(copies, self._outputs, strict=True):
            for into, block in zip(array, source, strict=True):
                self._copy(into, block)
        self._lending.flush()
        return copies

    def is_right(self, blocks: Sequence[Any], expected_outputs: Sequence[Sequence[Any]]) -> bool:
        """Return whether a replay makes the same blocks, bit for bit.

        All ranks call it, also with blocks that are no arrays. Then the answer is False.
        """
        expected = [block for array in expected_outputs for block in array]
        are_arrays = all(map(self._gpu.holds, (*blocks, *expected)))
        if not are_arrays or not all(map(_are_alike, blocks, self._inputs)):
            self._launch()  # for the other ranks
            return False
        replayed = [block for array in self(blocks) for block in array]
        return all(map(self._are_equal, replayed, expected))

    def _are_equal(self, one: Array, second: Array) -> bool:
        if not _are_alike(one, second):
            return False
        one, second = (array.copy().reshape(-1).view(np.uint8) for array in (one, second))
        same = int(self._gpu.module.count_nonzero(one == second))
        return same == int(one.nbytes)

    def _launch(self) -> None:
        self._calls += 1
        with self._gpu.reading:  # until all reads are enqueued
            self._gpu.check_goes_on()
            self._graph()
        self._lending.count_reads()
        self._gpu.keep_up(self._calls)

    def _patterned(self, block: Array) -> Array:
        memory = self._gpu.empty((block.nbytes,), np.dtype(np.uint8))
        if block.nbytes:
            memory[...] = _PATTERN
        return _in_order_of(block, memory.view(block.dtype).reshape)

    def _copy(self, into: Array, block: Array) -> None:
        if not _are_alike(block, into):
            raise SectionError(
                f"expected a block of shape {into.shape} and dtype {into.dtype}, as in earlier "
                f"calls, got {block.shape} and {block.dtype}."
            )
        self._lending.copy_pieces(into, block, _whole_block(block.shape), range(into.ndim))


def _in_order_of(block: Array, make: Callable[[tuple[int, ...]], Array]) -> Array:
    """Return an array whose axes have the same order in memory: rounding may depend on it."""
    order = memory_order(block.strides)
    ordered = make(tuple(block.shape[axis] for axis in order))
    return ordered.transpose(tuple(map(order.index, range(block.ndim))))


def _are_alike(one: Array, second: Array) -> bool:
    return bool(one.shape == second.shape and one.dtype == second.dtype)


def _try(function: Callable[[], _T]) -> _T | None:
    """Return the result of a function; None if it raises an error, unless the attempt has ended."""
    try:
        return function()
    except AttemptEndedError:
        raise
    except Exception:
        _LOG.debug("A call cannot be captured.", exc_info=True)
        return None


@lru_cache(maxsize=256)  # one object for equal arrays, as of `whole_piece`
def _whole_block(shape: tuple[int, ...]) -> SourcePieces:
    return SourcePieces(whole_piece(shape, shape))


# Tasks whose kernels a GPU may replay in place of further calls.
#
# Such a task depends on its inputs alone: `dask_p2p.sections.iterate.functions`. Functions of Dask
# and of this package do so, apart from random numbers. A call of a task gets its own copies of all
# other objects among its arguments, so they have no state. NumPy arrays among them are refused: a
# task would upload them.

_PACKAGES = frozenset({"cytoolz", "dask", "dask_array", "dask_p2p", "functools", "tlz", "toolz"})
_CONTAINERS = (tuple, list, set, frozenset, dict, GraphNode, functools.partial)
_CLASSES = (tuple, list, set, frozenset, dict)  # which Dask passes to its functions
_STATEFUL = "random"


def is_replayable_step(step: Any) -> bool:
    """Return whether a step of a program is known to depend on its inputs alone."""
    if isinstance(step, AssembleStep):
        return _is_replayable(step.block.epilogue, set())
    return _is_replayable(step, set())


def _is_replayable(value: Any, visited: set[int]) -> bool:
    if isinstance(value, np.ndarray):
        return False
    if id(value) in visited or is_constant(value) or any(value is kind for kind in _CLASSES):
        return True
    visited.add(id(value))
    is_named = isinstance(value, (FunctionType, BuiltinFunctionType, type))
    package, *modules = str((value if is_named else type(value)).__module__).split(".")
    if package in _PACKAGES or isinstance(value, _CONTAINERS):
        return _STATEFUL not in modules and all(_is_replayable(p, visited) for p in parts_of(value))
    return is_replayable(value)


# A rank enqueues its program once, while its stream is captured.
#
# During the capture, the ranks send each other the descriptors of their arrays. A rank that fails
# sends and receives an empty message in place of each later one. So others fail too, and no rank
# waits.


class GraphRunner(Runner):
    """Runs a program with the same exchanges on all ranks."""

    def __init__(
        self,
        ctx: ProgramContext,
        ready: ReadyProgram,
        lending: GraphLending,  # the memory of arrays that other ranks read
        exchanging: frozenset[int],  # the supersteps with an exchange of any rank
    ) -> None:
        super().__init__(ctx, ready, (Lending(ctx.connections), lending))
        self._progress = Progress()  # that of the rank counts calls
        self._device = HOST  # nothing is waited for
        self._lending, self._exchanging = lending, exchanging
        self._messages = self._graph_messages = _GraphMessages(ctx.connections, self._assembling)

    def run(self, blocks: Sequence[Any]) -> list[list[Any]]:
        outputs = super().run(blocks)
        self._lending.put_barrier()
        return outputs

    def skip(self) -> None:
        """Send and receive an empty message in place of each one that is left."""
        self._graph_messages.skip(self._program.supersteps)


class _GraphMessages(Messages):
    """Messages with descriptors, which end together on all ranks."""

    _next = 0  # superstep of the next message

    def exchange(self, number: int, superstep: Superstep, values: Any) -> None:
        self._next = number + 1
        super().exchange(number, superstep, values)

    def _sends(
        self, packed: Mapping[int, Packing], superstep: Superstep, values: Mapping[Key, Any]
    ) -> dict[int, bytearray]:
        try:
            return super()._sends(packed, superstep, values)
        except Exception:
            self._send_nothing(self._next - 1, superstep)
            raise

    def skip(self, supersteps: Sequence[Superstep]) -> None:
        for number in range(self._next, len(supersteps)):
            if supersteps[number].sends or supersteps[number].receives:
                self._send_nothing(number, supersteps[number])

    def _send_nothing(self, number: int, superstep: Superstep) -> None:
        sends = dict.fromkeys(superstep.sends, b"")
        self._connections.exchange(text_of(number), sends, dict.fromkeys(superstep.receives))


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
        self.results = len(self._outputs)
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
        pickled = dumps(handles, buffer_callback=buffers.append)
        parts = [pickled, *(buffer.raw() for buffer in buffers)]
        return [np.asarray(memoryview(part)) for part in (pack_frames_prelude(parts), *parts)]

    def restore(self, state: memoryview) -> None:
        pickled, *buffers = map(bytearray, unpack_frames(state))  # copies: functions may write
        self.handles |= loads(pickled, buffers=buffers)

    def has_one_dtype_by_shape(self) -> bool:
        """Return whether all handles with blocks of the same shapes have the same dtypes, too."""
        dtypes: dict[Any, Any] = {}
        for blocks in self.handles.values():
            shapes = tuple((index, block.shape) for index, block in blocks.items())
            dtypes_of_handle = [block.dtype for block in blocks.values()]
            if dtypes.setdefault(shapes, dtypes_of_handle) != dtypes_of_handle:
                return False
        return True

    def read(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the inputs of the program for a call, whose values come last.

        Arguments are numbers of handles, or values as `ResidentGang` sends them.
        """
        inputs = []
        for position, block in zip(self._inputs, self._blocks, strict=True):
            if position is None:
                inputs.append(block)
            elif type(argument := arguments[position[0]]) is int:
                inputs.append(self.handles[argument][position[1]])
            else:
                inputs.append(self._value(CallValue(position[0], "numpy"), argument))
        return [*inputs, *(self._value(x, arguments[x.number]) for x in self._call_values)]

    def _value(self, of_call: CallValue, message: Any) -> Any:
        last, array = self._values.get(of_call.number, (None, None))
        if last != message:
            form = loads(message) if isinstance(message, bytes) else from_quick_form(tuple(message))
            array = on_device(self._device, of_call, form)
            self._values[of_call.number] = message, array
        return array

    def add(self, first: int, outputs: Sequence[Sequence[Any]]) -> None:
        for number, (indices, blocks) in enumerate(zip(self._outputs, outputs, strict=True), first):
            self.handles[number] = dict(zip(indices, blocks, strict=True))

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.handles.pop(number, None)
