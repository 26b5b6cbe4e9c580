"""Calls of a resident gang that GPUs replay, without Python code on hosts.

A short call takes its hosts longer than its GPUs: messages, the launches of kernels, functions. So
after some calls each rank captures one as a CUDA graph, if the code of all functions shows that
they depend on their arguments alone. All ranks decide alike, in messages: whether all can capture a
call, have done so, and have got the values of their functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import order_of
from dask_p2p.backends.kernels.batch import whole_piece
from dask_p2p.errors import SectionError
from dask_p2p.fusing.resident.handle_table import HandleTable
from dask_p2p.fusing.running.graph_runner import GraphRunner
from dask_p2p.fusing.running.ready_program import ReadyProgram
from dask_p2p.fusing.running.replayable_steps import is_replayable_step
from dask_p2p.fusing.running.runner import ProgramContext, exchanging
from dask_p2p.sections.exchange.lending import SourcePieces
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.gpu.graph_lending import GraphLending
from dask_p2p.sections.gpu.graphs import can_wait_for_peers, captured, own_gpu, share_gpus
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.types import Array

_LOG = logging.getLogger(__name__)
_PATTERN = 0x3A  # byte of inputs during the capture: see `_CallGraph`
_VERIFIED_CALLS = 2
_CAN, _CANNOT = b"\1", b"\0"

_T = TypeVar("_T")


class ReplayedCalls:
    """The calls of one rank.

    Parameters
    ----------
    ctx, ready
        Context and program of the rank.
    table
        Its handles, which become arguments of later calls.
    run : callable
        Runs the program once: returns its outputs, from the inputs and the number of the call.
    """

    def __init__(
        self,
        ctx: ProgramContext,
        ready: ReadyProgram,
        table: HandleTable,
        run: Callable[[Sequence[Any], int], list[list[Any]]],
    ) -> None:
        self._ctx, self._ready, self._table, self._run = ctx, ready, table, run
        self._calls = 0
        self._replay: _CallGraph | None = None

    def call(self, blocks: Sequence[Any], number: int) -> list[list[Any]]:
        """Return the output blocks by array, from the blocks of the inputs."""
        count, self._calls = self._calls, self._calls + 1
        first, gpu = tuning.current.replay_after_calls, self._ctx.device
        if self._replay is not None and count >= first + _VERIFIED_CALLS:
            return self._replay(blocks)
        made = self._run(blocks, number)
        if not isinstance(gpu, Gpu):
            return made
        if count == first:
            self._replay = self._captured(gpu, blocks, made)
        if self._replay is not None and not self._all(self._replay.is_right(blocks, made)):
            _LOG.debug("A replayed call has other values: calls go on one by one.")
            self._replay = None
        return made

    def _captured(
        self, gpu: Gpu, blocks: Sequence[Any], made: Sequence[Sequence[Any]]
    ) -> _CallGraph | None:
        """Return a graph of a call; None if a rank cannot capture it. A call of all ranks."""
        supersteps = self._agreed(self._can_begin(gpu, blocks, made))
        if supersteps is None:
            return None
        lending = GraphLending(gpu, self._ctx.connections)
        runner = GraphRunner(self._ctx, self._ready, lending, supersteps)
        replay = _tried(lambda: _CallGraph(gpu, lending, blocks))
        if not self._all(lending.is_complete and replay is not None) or replay is None:
            return None
        has_captured = _tried(lambda: replay.capture(runner))
        runner.skip()
        return replay if self._all(has_captured is not None) else None

    def _can_begin(self, gpu: Gpu, blocks: Sequence[Any], made: Sequence[Sequence[Any]]) -> bool:
        """Return whether this rank can capture a call, and a call is short."""
        blocks = [*blocks, *(block for each in made for block in each)]
        handles = [block for each in self._table.handles.values() for block in each.values()]
        if not gpu.has_windows or not can_wait_for_peers():
            return False
        if not all(map(gpu.holds, (*blocks, *handles))):
            return False
        size_bytes, program = sum(int(block.nbytes) for block in blocks), self._ready.program
        return (
            size_bytes < tuning.current.gpu_overlap_bytes
            and self._table.has_one_dtype_by_shape()
            and not any(isinstance(each, np.ndarray) for each in program.literals.values())
            and all(is_replayable_step(step) for each in program.supersteps for step in each.steps)
        )

    def _agreed(self, can_begin: bool) -> frozenset[int] | None:
        """Return the supersteps with an exchange of any rank.

        None if a rank cannot begin, or if ranks share a GPU.
        """
        own, count = exchanging(self._ready.program), len(self._ready.steps)
        supersteps = bytes(n in own for n in range(count))
        data = b"".join((supersteps, _CAN if can_begin else _CANNOT, own_gpu()))
        found = [bytes(each) for each in self._gathered("begin of captured calls", data)]
        can_all = all(each[count:].startswith(_CAN) for each in found)
        if not can_all or share_gpus([each[count:] for each in found]):
            return None
        return frozenset(n for n in range(count) if any(each[n] for each in found))

    def _all(self, own: bool) -> bool:
        answers = self._gathered("captured calls", _CAN if own else _CANNOT)
        return all(bytes(each) == _CAN for each in answers)

    def _gathered(self, call: str, data: bytes) -> Sequence[Any]:
        connections = self._ctx.connections
        return [data] if connections.is_alone else connections.gather(call, data)


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
        """Enqueue a call; return its output blocks by array."""
        for number, block in enumerate(blocks):
            if block is not self._last[number]:
                self._copy(self._inputs[number], block)
                self._last[number] = block
        self._lending.flush()
        self._launch()
        made = [[self._empty_like(each) for each in array] for array in self._outputs]
        for array, found in zip(made, self._outputs, strict=True):
            for into, block in zip(array, found, strict=True):
                self._copy(into, block)
        self._lending.flush()
        return made

    def is_right(self, blocks: Sequence[Any], made: Sequence[Sequence[Any]]) -> bool:
        """Return whether a replay makes the same blocks, bit for bit.

        All ranks call it, also with blocks that are no arrays. Then the answer is False.
        """
        expected = [block for array in made for block in array]
        are_arrays = all(map(self._gpu.holds, (*blocks, *expected)))
        if not are_arrays or not all(map(_are_alike, blocks, self._inputs)):
            self._launch()  # for the other ranks
            return False
        found = [block for array in self(blocks) for block in array]
        return all(map(self._are_equal, found, expected))

    def _are_equal(self, one: Array, other: Array) -> bool:
        if not _are_alike(one, other):
            return False
        one, other = (each.copy().reshape(-1).view(np.uint8) for each in (one, other))
        same = int(self._gpu.module.count_nonzero(one == other))
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

    def _empty_like(self, block: Array) -> Array:
        return _in_order_of(block, lambda shape: self._gpu.empty(shape, block.dtype))

    def _copy(self, into: Array, block: Array) -> None:
        if not _are_alike(block, into):
            raise SectionError(
                f"expected a block of shape {into.shape} and dtype {into.dtype}, as in earlier "
                f"calls, got {block.shape} and {block.dtype}."
            )
        self._lending.copy_pieces(into, block, _whole(block.shape), range(into.ndim))


def _in_order_of(block: Array, make: Callable[[tuple[int, ...]], Array]) -> Array:
    """Return an array whose axes have the same order in memory: rounding may depend on it."""
    order = order_of(block.strides)
    made = make(tuple(block.shape[axis] for axis in order))
    return made.transpose(tuple(map(order.index, range(block.ndim))))


def _are_alike(one: Array, other: Array) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def _tried(function: Callable[[], _T]) -> _T | None:
    """Return the result of a function; None if it raises an error, unless the attempt has ended."""
    try:
        return function()
    except AttemptEndedError:
        raise
    except Exception:
        _LOG.debug("A call cannot be captured.", exc_info=True)
        return None


@lru_cache(maxsize=256)  # one object for equal arrays, as of `whole_piece`
def _whole(shape: tuple[int, ...]) -> SourcePieces:
    return SourcePieces(whole_piece(shape, shape))
