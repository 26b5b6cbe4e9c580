"""The functions of tasks: those of users, those that keep a state, and those that overwrite.

Dask pickles each task alone. So a function finds its closure, its default arguments, and the
objects among its arguments as they were in the client's process: a random generator, a buffer, a
counter. A program has one pickle for all tasks of a rank, which share these objects. So a rank
copies them for each task.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from distributed.protocol.pickle import dumps, loads

from dask_p2p.replayable import closure_values, codes_in

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
    """The functions in the tasks of one program, each examined once.

    Parameters
    ----------
    runs_again
        Whether the program runs again: then pickled functions are kept.
    """

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
        found = self._of_user.get(id(task))
        if found is None:
            self._of_user[id(task)] = False  # for functions that refer to themselves
            found = _is_of_user(task) or any(map(self.is_of_user, parts_of(task)))
            self._of_user[id(task)] = found
        return found

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
        found = self._constant.get(id(task))
        if found is None:
            self._constant[id(task)] = True
            found = isinstance(task, (np.generic, np.dtype)) or _is_importable(task)
            if isinstance(task, _OF_PARTS) or _is_own(task):
                parts = (*parts_of(task), *_globals(task))
                found = found or all(map(self.is_constant, parts))
            self._constant[id(task)] = found
        return found


def _is_of_user(value: Any) -> bool:
    """Return whether an object, apart from its parts, is of a user or has a changing state."""
    if not _GENERATORS.isdisjoint(each.__name__ for each in type(value).__mro__):
        return True
    if isinstance(value, functools.partial) and _overwrites(value.func, value.args, value.keywords):
        return True
    return callable(value) and (_package(value) not in _KNOWN or _is_bound(value))


def _overwrites(function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a call of a known function overwrites some of its arguments."""
    if isinstance(function, np.ufunc) and len(args) > function.nin:
        return True  # with the results among its arguments
    return any(function is each for each in _IN_PLACE) or any(
        (name in _FILLED and value is not None) or (name.startswith("overwrite_") and value)
        for name, value in keywords.items()
    )


def parts_of(whole: Any) -> Iterable[Any]:
    """Return the objects that another one is made of."""
    if isinstance(whole, Task):
        return (whole.func, *whole.args, *whole.kwargs.values())
    if isinstance(whole, DataNode):
        return (whole.value,)
    if isinstance(whole, dict):
        return (*whole.keys(), *whole.values())
    if isinstance(whole, (tuple, list, set, frozenset)):
        return whole
    if isinstance(whole, functools.partial):
        return (whole.func, *whole.args, *whole.keywords.values())
    if isinstance(whole, FunctionType):
        by_name = (whole.__kwdefaults__ or {}).values()
        return (
            *closure_values(whole),
            *(whole.__defaults__ or ()),
            *by_name,
            *vars(whole).values(),
        )
    if isinstance(whole, (type, np.ufunc, np.ndarray)):
        return ()
    slots = getattr(type(whole), "__slots__", ())
    in_slots = [getattr(whole, name, None) for name in ((slots,) if type(slots) is str else slots)]
    return (*in_slots, *getattr(whole, "__dict__", {}).values())


def _globals(function: Any) -> Iterable[Any]:
    """Return the global objects that a function refers to."""
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
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _is_bound(function: Any) -> bool:
    """Return whether a function is a method of an object, which it may change."""
    return not isinstance(getattr(function, "__self__", None), (type(None), type, ModuleType))


def _is_own(value: Any) -> bool:
    """Return whether an object is a value of this package, with a user's function inside."""
    return type(value).__module__.partition(".")[0] == "dask_p2p"


def _package(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]
