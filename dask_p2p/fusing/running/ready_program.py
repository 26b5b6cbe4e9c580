"""A program in the form in which a rank runs it: each task as a function of the rank's values.

Dask's tasks look for nested tasks among their arguments, and check that all values are there, in
each call. These take up to 15 µs, where NumPy needs 5 for a small block. So they are resolved once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef

from dask_p2p.fusing.planning.program import AssembleStep, CallValue, Program
from dask_p2p.fusing.running.functions import Functions
from dask_p2p.fusing.running.values import CountedValues, LiveValues
from dask_p2p.types import Key

#: Returns the value of a task from those that it reads.
Call: TypeAlias = Callable[[Mapping[Key, Any]], Any]

#: Literals that no function can change, or that are copied before one does.
_UNCHANGED = (
    CallValue,
    np.ndarray,
    np.generic,
    np.dtype,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
)

# Programs that a worker keeps: together about 50 MB of tasks.
_MOST_BYTES = 2**20  # as they are packed


class ReadyStep(NamedTuple):
    """A task of a program, ready to run."""

    key: Key
    reads: tuple[Key, ...]  # keys of the values that it uses
    call: Call | None  # None: the step assembles a block
    overwrites: bool  # whether the call may overwrite its arguments
    assembly: AssembleStep | None


class ReadyProgram:
    """The program of a rank, for one run or many.

    Parameters
    ----------
    program
        The program.
    runs_again
        Whether it runs again: then no run changes its functions and literals.
    """

    def __init__(self, program: Program, runs_again: bool = False) -> None:
        self.program, self.runs_again = program, runs_again
        #: Keys of the values that a run gets: blocks of Dask, and values of a call.
        self.inputs = (*program.inputs, *program.call_values)
        self.literals = {k: v for k, v in program.literals.items() if k not in program.call_values}
        self._functions = Functions(runs_again)
        #: Steps by superstep.
        self.steps = [list(map(self._ready, each.steps)) for each in program.supersteps]
        self._overwrites = any(step.overwrites for each in self.steps for step in each)

    def values(self, is_lent: Callable[[Any], bool]) -> CountedValues:
        """Return the container for the values of a run."""
        if self._overwrites:
            return LiveValues(self.program.uses, is_lent)
        return CountedValues(self.program.uses)

    def assembly(self, step: ReadyStep) -> AssembleStep:
        """Return the assembly of a block, with a function for one call."""
        found = step.assembly
        assert found is not None, "the step is a task"
        epilogue = found.block.epilogue
        functions = self._functions
        if epilogue is None or functions.is_constant(epilogue):  # as most
            return found
        if not functions.is_of_user(epilogue):
            return found
        return found._replace(block=found.block._replace(epilogue=functions.fresh(epilogue)))

    def _ready(self, step: Any) -> ReadyStep:
        if isinstance(step, AssembleStep):
            reads = tuple([key for _, key in step.local])
            return ReadyStep(step.block.key, reads, None, False, step)
        reads, functions = tuple(step.dependencies), self._functions
        if not functions.is_of_user(step):
            return ReadyStep(step.key, reads, call_of(step), False, None)
        if functions.is_constant(step):
            return ReadyStep(step.key, reads, call_of(step), True, None)
        return ReadyStep(step.key, reads, lambda values: functions.fresh(step)(values), True, None)


def call_of(node: Any) -> Call:
    """Return the function that evaluates a task, or an argument of one."""
    kind = type(node)
    if kind is TaskRef:
        return itemgetter(node.key)
    if kind is Alias:
        return itemgetter(node.target)
    if isinstance(node, Task) and kind.__call__ is Task.__call__:
        return _call_of_task(node)
    if isinstance(node, GraphNode) and kind is not DataNode:
        keys = tuple(node.dependencies)
        return lambda values: node({key: values[key] for key in keys})
    value = node.value if kind is DataNode else node
    return lambda values: value


def _call_of_task(task: Task) -> Call:
    func, arguments = task.func, _arguments_of(task.args)
    if not task.kwargs:
        return lambda values: func(*arguments(values))
    if not any(isinstance(each, (GraphNode, TaskRef)) for each in task.kwargs.values()):
        kwargs = task.kwargs
        return lambda values: func(*arguments(values), **kwargs)
    calls = {name: call_of(each) for name, each in task.kwargs.items()}
    return lambda values: func(
        *arguments(values), **{name: call(values) for name, call in calls.items()}
    )


def _arguments_of(args: tuple[Any, ...]) -> Callable[[Mapping[Key, Any]], Any]:
    """Return the function that returns the positional arguments of a task."""
    if len(args) > 1 and all(type(each) is TaskRef for each in args):
        return itemgetter(*(each.key for each in args))
    if not any(isinstance(each, (GraphNode, TaskRef)) for each in args):
        return lambda values: args
    calls = [call_of(each) for each in args]
    if len(calls) == 1:
        (first,) = calls
        return lambda values: (first(values),)
    return lambda values: [call(values) for call in calls]


class KeptPrograms:
    """Programs that ran here and may run again, by their packed form. Thread-safe."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._lock, self._most_bytes = threading.Lock(), most_bytes
        self._programs: dict[bytes, ReadyProgram] = {}  # in the order of their last run

    @contextmanager
    def running(
        self, packed: bytes, unpacked: Callable[[bytes], Program]
    ) -> Iterator[ReadyProgram]:
        """Return a program for one run; keep it afterwards, unless an exception ends the run."""
        with self._lock:
            ready = self._programs.pop(packed, None)  # for this run alone
        if ready is None:
            program = unpacked(packed)
            is_kept = all(isinstance(each, _UNCHANGED) for each in program.literals.values())
            ready = ReadyProgram(program, is_kept and len(packed) <= self._most_bytes)
        yield ready
        if ready.runs_again:
            with self._lock:
                self._programs[packed] = ready
                while sum(map(len, self._programs)) > self._most_bytes:
                    del self._programs[next(iter(self._programs))]
