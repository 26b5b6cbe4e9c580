"""A program in the form in which a rank runs it: each task as a function of the rank's values.

Dask's tasks look for nested tasks among their arguments, and check that all values are there, in
each call. These take up to 15 µs, where NumPy needs 5 for a small block. So they are resolved once.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from dask.sizeof import sizeof
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from distributed.protocol.pickle import dumps, loads
from numpy.lib.array_utils import byte_bounds

from dask_p2p.fusing.planning.sizes import AssembleStep, CallValue, Program
from dask_p2p.sections.iterate.functions import closure_values, codes_in
from dask_p2p.types import Array, Key, Kind

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

# Pickles of the programs that a worker keeps: together about 50 MB of tasks.
_MOST_BYTES = 2**22


class ReadyStep(NamedTuple):
    """A task of a program, ready to run."""

    key: Key
    reads: tuple[Key, ...]  # keys of the values that it uses
    call: Call | None  # None: the step assembles a block
    overwrites: bool  # whether the call may overwrite its arguments
    assembly: AssembleStep | None


class ReadyProgram:
    """The program of a rank, for one run; or for many, which leave functions and literals alone."""

    def __init__(self, program: Program, runs_again: bool = False) -> None:
        self.program, self.runs_again = program, runs_again
        #: Keys of the values that a run gets: blocks of Dask, and values of a call.
        self.inputs = (*program.inputs, *program.call_values)
        self.literals = {k: v for k, v in program.literals.items() if k not in program.call_values}
        self._functions = Functions(runs_again)
        #: Steps by superstep.
        self.steps = [list(map(self._ready, superstep.steps)) for superstep in program.supersteps]
        self._overwrites = any(step.overwrites for steps in self.steps for step in steps)

    def values(self, is_lent: Callable[[Any], bool]) -> CountedValues:
        if self._overwrites:
            return LiveValues(self.program.uses, is_lent)
        return CountedValues(self.program.uses)

    def assembly(self, step: ReadyStep) -> AssembleStep:
        """Return the assembly of a block, with a function for one call."""
        assembly = step.assembly
        assert assembly is not None, "the step is a task"
        epilogue = assembly.block.epilogue
        functions = self._functions
        if epilogue is None or functions.is_constant(epilogue):  # as most
            return assembly
        if not functions.is_of_user(epilogue):
            return assembly
        return assembly._replace(block=assembly.block._replace(epilogue=functions.fresh(epilogue)))

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
    if not any(isinstance(argument, (GraphNode, TaskRef)) for argument in task.kwargs.values()):
        kwargs = task.kwargs
        return lambda values: func(*arguments(values), **kwargs)
    calls = {name: call_of(argument) for name, argument in task.kwargs.items()}
    return lambda values: func(
        *arguments(values), **{name: call(values) for name, call in calls.items()}
    )


def _arguments_of(args: tuple[Any, ...]) -> Callable[[Mapping[Key, Any]], Any]:
    if len(args) > 1 and all(type(argument) is TaskRef for argument in args):
        return itemgetter(*(argument.key for argument in args))
    if not any(isinstance(argument, (GraphNode, TaskRef)) for argument in args):
        return lambda values: args
    calls = [call_of(argument) for argument in args]
    if len(calls) == 1:
        (first,) = calls
        return lambda values: (first(values),)
    return lambda values: [call(values) for call in calls]


class KeptPrograms:
    """Programs that ran here and may run again, by their pickles. Thread-safe."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._lock, self._most_bytes = threading.Lock(), most_bytes
        self._programs: dict[bytes, ReadyProgram] = {}  # in the order of their last run

    @contextmanager
    def running(self, pickled: bytes) -> Iterator[ReadyProgram]:
        """Return a program for one run; keep it afterwards, unless an exception ends the run."""
        with self._lock:
            ready = self._programs.pop(pickled, None)  # for this run alone
        if ready is None:
            program = loads(pickled)
            is_kept = all(isinstance(literal, _UNCHANGED) for literal in program.literals.values())
            ready = ReadyProgram(program, is_kept and len(pickled) <= self._most_bytes)
        yield ready
        if ready.runs_again:
            with self._lock:
                self._programs[pickled] = ready
                while sum(map(len, self._programs)) > self._most_bytes:
                    del self._programs[next(iter(self._programs))]


# The functions of tasks: those of users, those that keep a state, and those that overwrite.
#
# Dask pickles each task alone. So a function finds its closure, its default arguments, and the
# objects among its arguments as they were in the client's process: a random generator, a buffer, a
# counter. A program has one pickle for all tasks of a rank, which share these objects. So a rank
# copies them for each task.

#: Packages whose functions neither overwrite their arguments nor keep a state, unless a call says
#: so: `_overwrites`.
_KNOWN = (
    *("_operator", "builtins", "cupy", "cupyx", "cytoolz", "dask", "dask_array", "dask_p2p"),
    *("functools", "math", "numpy", "operator", "scipy", "tlz", "toolz"),
)
_CONSTANT = {
    *(int, float, complex, str, bytes, bool, slice, range, type(None), type(Ellipsis)),
    *(TaskRef, Alias, ModuleType),
}


#: Operators that overwrite their first argument.
_IN_PLACE = (
    *(operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul),
    *(operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift),
    *(operator.isub, operator.itruediv, operator.ixor),
)
#: Keywords of arrays that a function fills.
_FILLED = {"out", "output"}
#: Classes of random generators, of NumPy and CuPy. Each call changes their state.
_GENERATORS = {"BitGenerator", "Generator", "RandomState"}


#: Classes of objects that are constant if all their parts are.
_OF_PARTS = (tuple, frozenset, GraphNode, FunctionType, functools.partial)


class Functions:
    """The functions in the tasks of one program, each examined once."""

    def __init__(self, runs_again: bool = False) -> None:
        self._runs_again = runs_again
        self._pickled: dict[int, bytes] = {}  # by id, as functions are before their first call
        self._of_user: dict[int, bool] = {}  # by id: all objects are those of the program
        self._constant: dict[int, bool] = {}

    def is_of_user(self, task: Any) -> bool:
        """Return whether a task, or a function, may change its arguments or keep a state.

        Functions of unknown packages may.
        """
        kind = type(task)
        if kind in _CONSTANT:
            return False
        if kind is Task or isinstance(task, (tuple, list, set, dict, GraphNode)):
            if kind is Task and _overwrites(task.func, task.args, task.kwargs):
                return True
            for part in parts_of(task):  # a loop: `any` takes twice as long
                if type(part) not in _CONSTANT and self.is_of_user(part):
                    return True
            return False
        is_users = self._of_user.get(id(task))
        if is_users is None:
            self._of_user[id(task)] = False  # for functions that refer to themselves
            is_users = _is_of_user(task) or any(map(self.is_of_user, parts_of(task)))
            self._of_user[id(task)] = is_users
        return is_users

    def fresh(self, task: Any) -> Any:
        """Return a user's task or function; a copy of it if a call may change it."""
        if self.is_constant(task):
            return task
        pickled = self._pickled.get(id(task)) or dumps(task)
        if self._runs_again:
            self._pickled[id(task)] = pickled
        return loads(pickled)

    def is_constant(self, task: Any) -> bool:
        """Return whether no call can change an object, apart from those of its module."""
        if type(task) in _CONSTANT:
            return True
        constant = self._constant.get(id(task))
        if constant is None:
            self._constant[id(task)] = True
            constant = isinstance(task, (np.generic, np.dtype)) or _is_importable(task)
            is_of_package = type(task).__module__.partition(".")[0] == "dask_p2p"
            if is_of_package or isinstance(task, _OF_PARTS):
                parts = (*parts_of(task), *_globals(task))
                constant = constant or all(map(self.is_constant, parts))
            self._constant[id(task)] = constant
        return constant


def _is_of_user(value: Any) -> bool:
    """Return whether an object, apart from its parts, is of a user or has a changing state."""
    if not _GENERATORS.isdisjoint(base.__name__ for base in type(value).__mro__):
        return True
    if isinstance(value, functools.partial) and _overwrites(value.func, value.args, value.keywords):
        return True
    return callable(value) and (_package(value) not in _KNOWN or _is_bound(value))


def _overwrites(function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a call of a known function overwrites some of its arguments."""
    if isinstance(function, np.ufunc) and len(args) > function.nin:
        return True  # with the results among its arguments
    return any(function is operation for operation in _IN_PLACE) or any(
        (name in _FILLED and value is not None) or (name.startswith("overwrite_") and value)
        for name, value in keywords.items()
    )


def parts_of(value: Any) -> Iterable[Any]:
    """Return the objects that another one is made of."""
    if isinstance(value, Task):
        return (value.func, *value.args, *value.kwargs.values())
    if isinstance(value, DataNode):
        return (value.value,)
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        by_name = (value.__kwdefaults__ or {}).values()
        return (
            *closure_values(value),
            *(value.__defaults__ or ()),
            *by_name,
            *vars(value).values(),
        )
    if isinstance(value, (type, np.ufunc, np.ndarray)):
        return ()
    slots = getattr(type(value), "__slots__", ())
    in_slots = [getattr(value, name, None) for name in ((slots,) if type(slots) is str else slots)]
    return (*in_slots, *getattr(value, "__dict__", {}).values())


def _globals(function: Any) -> Iterable[Any]:
    if not isinstance(function, FunctionType):
        return
    for code in codes_in(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]


def _is_importable(value: Any) -> bool:
    """Return whether a pickle has the name of a function or class, and not its contents."""
    if not callable(value) or _is_bound(value):
        return False
    if isinstance(value, (np.ufunc, BuiltinFunctionType)):
        return True
    if not hasattr(value, "__qualname__"):
        return False
    target: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        target = getattr(target, name, None)
    return target is value


def _is_bound(function: Any) -> bool:
    return not isinstance(getattr(function, "__self__", None), (type(None), type, ModuleType))


def _package(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]


# The values of one rank, and the memory that they share.
#
# With Dask's tasks a function that overwrites its argument may change the values of other tasks, or
# not: that depends on their order and their workers. A rank would always change them, and an
# attempt that follows would find changed inputs. So functions of users get copies of arrays in use
# elsewhere.

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
        remaining_uses = self._uses[key] = self._uses[key] - 1
        if not remaining_uses:
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
    copied: Array = np.ndarray(array.shape, array.dtype, memory, start, array.strides)
    copied[...] = array
    return copied
