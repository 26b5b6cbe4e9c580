"""Functions whose kernels may be replayed in place of further calls.

Such a function depends on its arguments alone, and changes nothing but its results: it has no
counter, no random numbers, no output. Its code shows this, and the code of the functions that it
calls. The rules refuse some functions that would do, such as methods: these are called.

A pickled copy of a function may be called if the call changes nothing but the copy: arrays and
counters of its closure, attributes of its object, a generator of random numbers.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

#: Packages whose functions keep no state, apart from their modules of random numbers.
_PACKAGES = frozenset({"cupy", "cupyx", "numpy", "scipy", "math", "operator", "_operator"})
#: Modules that draw random numbers, or use files; functions, methods and classes that write files.
_STATEFUL = frozenset({
    *("random", "stats", "io", "save", "savez", "savez_compressed", "save_npz", "savetxt"),
    *("tofile", "dump", "memmap", "open_memmap"),
})  # fmt: skip
#: What copies may use, too: generators of their own, clocks and lines of text.
_OWN_GENERATORS = frozenset({"default_rng", "Generator", "RandomState", "SeedSequence", "Philox"})
_COPIED = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_CONSTANT = (
    *(bool, int, float, complex, str, bytes, slice, range, type(None), type(Ellipsis)),
    *(np.generic, np.dtype),
)
#: Classes of these packages whose objects are functions.
_KERNELS = frozenset({
    *("ufunc", "RawKernel", "ElementwiseKernel", "ReductionKernel", "Fusion", "vectorize"),
    *("_JitRawKernel", "_ArrayFunctionDispatcher"),
})  # fmt: skip
_BUILTINS = frozenset({
    *("abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float"),
    *("int", "isinstance", "len", "list", "map", "max", "min", "pow", "range", "reversed"),
    *("round", "set", "slice", "sorted", "str", "sum", "tuple", "type", "zip"),
    *("AssertionError", "IndexError", "NotImplementedError", "RuntimeError", "TypeError"),
    "ValueError",
})  # fmt: skip
_OF_COPIES = (_BUILTINS | {"print", "getattr", "hasattr"}) - {"type"}  # classes are not copied
#: Special methods that dataclasses have, or that neither the code nor a pickle calls.
_NOT_CALLED = frozenset({
    *("__init__", "__new__", "__repr__", "__str__", "__eq__", "__hash__"),
    *("__setattr__", "__delattr__", "__replace__"),
})  # fmt: skip
_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME"})
_MOST_BYTES = 2**26  # of a copy's arrays
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_replayable(function: Callable[..., Any]) -> bool:
    """Return whether a function is known to depend on its arguments alone."""
    return _is_plain(function, _Search())


def is_isolated(function: Callable[..., Any]) -> bool:
    """Return whether calls of a pickled copy are known to change nothing but the copy.

    False also for a function with more than 64 MiB of arrays: a copy takes long.
    """
    search = _Search(is_copy=True)
    is_plain = _is_plain(function, search) and search.are_methods_plain()
    return is_plain and search.array_bytes <= _MOST_BYTES


class _Search(set[int]):
    """The ids of values that a search has examined, and the objects among them."""

    def __init__(self, is_copy: bool = False) -> None:
        super().__init__()
        self.is_copy = is_copy  # whether copies of the values are called
        self.objects: list[Any] = []
        self.names: set[str] = set()  # of attributes in the code
        self.array_bytes = 0

    def are_methods_plain(self) -> bool:
        """Return whether the methods that the code may call on the objects are plain, too."""
        done: set[tuple[int, str]] = set()
        while left := {(n, name) for n, _ in enumerate(self.objects) for name in self.names} - done:
            done |= left
            for number, name in left:
                own = _attribute(type(self.objects[number]), name)
                own = own.fget if isinstance(own, property) else own
                own = own.__func__ if isinstance(own, staticmethod) else own
                rules = self if type(own) is FunctionType else _Search()  # a class is not copied
                if own is not None and not _is_plain(own, rules):
                    return False
        return True


def is_constant(value: Any) -> bool:
    """Return whether no function can change an argument: a number, a text, or an array.

    The first step finds functions that write into arrays.
    """
    is_array = _package(type(value)) in _PACKAGES and type(value).__name__ == "ndarray"
    is_tuple = type(value) is tuple and all(map(is_constant, value))
    return is_array or is_tuple or isinstance(value, _CONSTANT)


def _is_plain(value: Any, seen: _Search) -> bool:
    """Return whether a value that a function uses neither changes nor has a state."""
    if isinstance(value, _CONSTANT) or id(value) in seen:
        return True
    seen.add(id(value))
    if type(value) in (tuple, frozenset):
        return all(_is_plain(each, seen) for each in value)
    if type(value) is functools.partial:
        parts = value.func, value.args, tuple(value.keywords.values())
        return not vars(value) and all(_is_plain(each, seen) for each in parts)
    if isinstance(value, functools._lru_cache_wrapper):
        return _is_plain(value.__wrapped__, seen)
    if _is_kernel(value) or _is_of_library(value):
        return True
    if type(value) is FunctionType:
        return _is_plain_function(value, seen)
    return seen.is_copy and _is_copied(value, seen)


def _is_copied(value: Any, seen: _Search) -> bool:
    """Return whether a pickled copy of a value has all that calls may change."""
    if isinstance(value, _COPIED):
        return True
    if isinstance(value, np.ndarray):
        seen.array_bytes += value.nbytes
        return not value.dtype.hasobject
    if type(value) in (list, set):
        return all(_is_plain(each, seen) for each in value)
    if type(value) is dict:
        return all(_is_plain(each, seen) for each in (*value.keys(), *value.values()))
    if type(value) is MethodType:
        return _is_plain(value.__func__, seen) and _is_plain(value.__self__, seen)
    if value is time or getattr(value, "__self__", None) is time:
        return True
    kind = type(value)
    is_of_user = type(kind) is type and kind.__module__ not in sys.stdlib_module_names
    if not is_of_user or not hasattr(value, "__dict__") or _attribute(kind, "__reduce__"):
        return False
    seen.objects.append(value)
    seen.names |= _special_methods(kind)
    return all(_is_plain(each, seen) for each in vars(value).values())


def _special_methods(kind: type) -> set[str]:
    """Return the special methods that operators, calls and pickles of an object may call."""
    found = (item for each in kind.__mro__[:-1] for item in vars(each).items())
    of_class = {name for name, own in found if type(own) is FunctionType and name[:2] == "__"}
    return of_class - _NOT_CALLED


def _attribute(kind: type, name: str) -> Any:
    """Return an attribute of a class, or of those that it inherits from; None without one."""
    return next((vars(each)[name] for each in kind.__mro__[:-1] if name in vars(each)), None)


def _is_plain_function(function: FunctionType, seen: _Search) -> bool:
    code = function.__code__
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if code.co_flags & _GENERATORS or vars(function):
        return False
    if not all(_is_plain(each, _owned(function, seen)) for each in values):
        return False
    if not all(_is_plain(each, seen) for each in closure_values(function)):
        return False
    return all(_is_plain_code(each, function, seen) for each in codes_in(code))


def _is_plain_code(code: CodeType, function: FunctionType, seen: _Search) -> bool:
    outer = function.__code__.co_freevars
    before: str | None = None  # the attribute that the previous instruction reads
    for instruction in dis.get_instructions(code):
        name, kind = instruction.argval, instruction.opname
        if kind in _STORES and not (seen.is_copy and kind == "STORE_ATTR"):
            return False
        if kind in ("STORE_DEREF", "DELETE_DEREF") and name in outer and not seen.is_copy:
            return False
        if kind == "IMPORT_NAME" and not _is_stateless(name):
            return False
        if before in _STATEFUL and not (seen.is_copy and name in _OWN_GENERATORS):
            return False
        before = None
        if seen.is_copy and name == "__class__":  # a class is not copied
            return False
        if kind in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            seen.names.add(name)
            before = name
        if kind in ("LOAD_GLOBAL", "LOAD_NAME") and not _is_plain_global(name, function, seen):
            return False
    return True


def _is_plain_global(name: str, function: FunctionType, seen: _Search) -> bool:
    if name in function.__globals__:
        value = function.__globals__[name]
        rules = seen if type(value) is FunctionType else _owned(function, seen)
        return _is_plain(value, rules) or (seen.is_copy and value is time)
    known = _OF_COPIES if seen.is_copy else _BUILTINS
    return name in known


def _owned(function: FunctionType, seen: _Search) -> _Search:
    """Return the search for global and default values of a function.

    A pickled copy has copies of them, unless it is a reference to a name of a module.
    """
    is_copied = function.__module__ == "__main__" or "<l" in function.__qualname__
    return seen if is_copied else _Search()


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code, and those of the functions inside."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def closure_values(function: FunctionType) -> Iterator[Any]:
    """Yield the variables of a function's closure that have values."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # of a function that is being defined
            yield cell.cell_contents


def _is_kernel(value: Any) -> bool:
    kind = type(value)
    is_stateful = getattr(value, "__name__", None) in _STATEFUL  # as numpy.save
    return kind.__name__ in _KERNELS and _package(kind) in _PACKAGES and not is_stateful


def _is_of_library(value: Any) -> bool:
    """Return whether a module, function or class belongs to a package without a state."""
    if isinstance(value, ModuleType):
        return _is_stateless(value.__name__)
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType):
        return False  # a method of an object
    is_known = isinstance(value, (type, FunctionType, BuiltinFunctionType))
    return is_known and _is_stateless(f"{value.__module__}.{value.__name__}")


def _is_stateless(module: str) -> bool:
    package, *others = module.split(".")
    return package in _PACKAGES and _STATEFUL.isdisjoint(others)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None)).partition(".")[0]
