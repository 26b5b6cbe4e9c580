"""The settings of a run, as texts that a later run compares: functions and their arguments.

A text depends on what a function computes with: its bytecode and constants, and the values of its
closure, of its defaults, and of the global variables that it reads, user's functions among them. It
depends neither on lines, files and comments, nor on the process and its hash seed. Of a dict, a
module or an object with attributes the text has the entries that the functions name, if they name
any: so it does not depend on ``params["steps"]``.
"""

from __future__ import annotations

import dis
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from dask.base import is_dask_collection

_PLAIN = bool, int, float, complex, str, bytes, type(None), type(...)
#: Their states are those of the beginning; a run that resumes does not repeat their numbers.
_GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    np.random.SeedSequence,
    random.Random,
)
#: Methods that name all attributes, and that steps do not call.
_MAKE_OR_COMPARE = {"__init__", "__post_init__", "__repr__", "__eq__", "__hash__", "__replace__"}
_READS_GLOBAL = "LOAD_GLOBAL", "LOAD_NAME"


class Descriptions:
    """Describes functions, and values that they use.

    Parameters
    ----------
    values : iterable
        All functions and values to describe.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._is_selecting = False  # whether entries that are not named are left out
        self._names = set[str]()  # of variables, attributes and keys in the code of functions
        self._texts: dict[int, tuple[Any, str]] = {}  # by identity, with the value itself
        for value in values:
            self(value)
        self._is_selecting = True
        self._texts.clear()

    def __call__(self, value: Any) -> str:
        """Return the text of a value."""
        if isinstance(value, np.generic):
            return f"{value.dtype.str} {value!r}"
        if type(value) in _PLAIN:
            return repr(value)
        if id(value) not in self._texts:
            self._texts[id(value)] = value, "<above>"  # for values that have themselves
            try:
                text = "|".join(self._parts(value))
            except Exception:  # such as that of a lock, which has no pickle
                text = type(value).__qualname__
            digest = blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()
            self._texts[id(value)] = value, f"{type(value).__name__} {digest}"
        return self._texts[id(value)][1]

    def _parts(self, value: Any) -> Iterator[str]:
        """Yield texts of the parts of a value, in an order that is always the same."""
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            yield f"{value.dtype.str} {value.shape}"
            yield blake2b(np.ascontiguousarray(value).tobytes()).hexdigest()
        elif isinstance(value, (tuple, list)):
            yield from map(self, value)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(map(self, value))
        elif isinstance(value, dict):
            yield from self._entries(value)
        elif isinstance(value, _GENERATORS) or is_dask_collection(value):
            yield ""
        elif isinstance(value, CodeType):
            yield from self._code(value, value.co_consts)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, ModuleType):
            yield value.__name__
            if not _is_library(value.__name__):
                yield from self._entries(vars(value), may_be_all=False)
        elif isinstance(value, type):
            yield value.__qualname__
            if not _is_library(value.__module__):
                yield from map(self, value.__bases__)
                for name, method in sorted(vars(value).items()):
                    if isinstance(method, FunctionType) and name not in _MAKE_OR_COMPARE:
                        yield f"{name} {self(method)}"
        elif (function := _compiled_from(value)) is not None:
            yield self(function)
        else:
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                yield reduced
                return
            function, args, state, *iterators = (*reduced, None, None, None)[:5]
            yield from map(self, (function, args, state))
            yield from (self([*iterator]) for iterator in iterators if iterator is not None)

    def _entries(self, values: Mapping[Any, Any], may_be_all: bool = True) -> Iterator[str]:
        """Yield texts of the entries that functions name, or of all if they name none."""
        names = [name for name in values if isinstance(name, str) and name in self._names]
        if may_be_all and not (self._is_selecting and names):
            names = [*values]
        yield from sorted(f"{self(name)}: {self(values[name])}" for name in names)

    def _function(self, function: FunctionType) -> Iterator[str]:
        yield function.__name__
        code = function.__code__
        if _is_library(function.__module__):
            yield f"{function.__module__}.{function.__qualname__}"
        else:
            has_text = bool(code.co_consts) and code.co_consts[0] == function.__doc__
            yield from self._code(code, code.co_consts[1 if has_text else 0 :])
            values = function.__globals__
            for name in sorted(_global_names(code) & values.keys()):
                yield f"{name}: {self(values[name])}"
        yield self(function.__defaults__)
        yield self(function.__kwdefaults__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield f"{name}: {self(cell.cell_contents)}"
            except ValueError:  # the variable has no value
                yield name

    def _code(self, code: CodeType, constants: Iterable[Any]) -> Iterator[str]:
        constants = [*constants]
        self._names.update(code.co_names, code.co_varnames)
        self._names.update(value for value in constants if isinstance(value, str))
        yield code.co_code.hex()
        yield f"{code.co_names} {code.co_varnames} {code.co_argcount} {code.co_kwonlyargcount}"
        yield from map(self, constants)


def _global_names(code: CodeType) -> set[str]:
    """Return the names of global variables that code reads, and functions within it."""
    instructions = dis.get_instructions(code)
    names = {
        instruction.argval for instruction in instructions if instruction.opname in _READS_GLOBAL
    }
    inner = (value for value in code.co_consts if isinstance(value, CodeType))
    return names.union(*map(_global_names, inner))


def _compiled_from(value: Any) -> Any:
    """Return the Python function of one that Numba or JAX has compiled, or that has a cache."""
    return getattr(value, "py_func", None) or getattr(value, "__wrapped__", None)


@cache
def _is_library(module: str | None) -> bool:
    """Return whether a module is not the user's: one of Python, or an installed package."""
    root = (module or "__main__").partition(".")[0]
    if root in (*sys.builtin_module_names, *sys.stdlib_module_names, "dask_p2p"):
        return root != "__main__"
    file = getattr(sys.modules.get(root), "__file__", None)
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return file is not None and any(map(Path(file).is_relative_to, folders))
