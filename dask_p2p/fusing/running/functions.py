"""The functions of tasks: those of users, and those that keep a state.

Dask pickles each task alone. So a function finds its closure, its default arguments, and the
objects among its arguments as they were in the client's process: a random generator, a buffer, a
counter. A program has one pickle for all tasks of a rank, which share these objects. So a rank
copies them for each task.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from distributed.protocol.pickle import dumps, loads

from dask_p2p.sections.iterate.capture.replayable import closure_values, codes_in

#: Packages whose functions neither overwrite their arguments nor keep a state.
_KNOWN = (
    *("_operator", "builtins", "cupy", "cupyx", "cytoolz", "dask", "dask_array", "dask_p2p"),
    *("functools", "math", "numpy", "operator", "scipy", "tlz", "toolz"),
)
_CONSTANT = {
    *(int, float, complex, str, bytes, bool, slice, range, type(None), type(Ellipsis)),
    *(TaskRef, Alias, ModuleType),
}


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
        """Return whether a task, or a function, calls a function of an unknown package."""
        kind = type(task)
        if kind in _CONSTANT:
            return False
        if kind is Task or isinstance(task, (tuple, list, set, dict, GraphNode)):
            return any(type(p) not in _CONSTANT and self.is_of_user(p) for p in parts_of(task))
        found = self._of_user.get(id(task))
        if found is None:
            self._of_user[id(task)] = False  # for functions that refer to themselves
            is_unknown = callable(task) and (_package(task) not in _KNOWN or _is_bound(task))
            found = is_unknown or any(map(self.is_of_user, parts_of(task)))
            self._of_user[id(task)] = found
        return found

    def fresh(self, task: Any) -> Any:
        """Return a user's task or function; a copy of it if a call may change it."""
        if self._is_constant(task):
            return task
        pickled = self._pickled.get(id(task)) or dumps(task)
        if self._runs_again:
            self._pickled[id(task)] = pickled
        return loads(pickled)

    def _is_constant(self, task: Any) -> bool:
        """Return whether no call can change an object, apart from those of its module."""
        if type(task) in _CONSTANT:
            return True
        if isinstance(task, (tuple, frozenset, GraphNode)):
            return all(map(self._is_constant, parts_of(task)))
        found = self._constant.get(id(task))
        if found is None:
            self._constant[id(task)] = True
            found = isinstance(task, (np.generic, np.dtype)) or _is_importable(task)
            if isinstance(task, (FunctionType, functools.partial)) or _is_own(task):
                parts = (*parts_of(task), *_globals(task))
                found = found or all(map(self._is_constant, parts))
            self._constant[id(task)] = found
        return found


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
