"""The functions of users: arguments of that of `iterate`, and whether kernels may be replayed."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from dask.utils import has_keyword

from dask_p2p.errors import InputError
from dask_p2p.inputs import describe_function

OUT, AT = "out", "at"  # parameters that are neither fields nor constants
#: Names of their values, by parameter: no user's name is like these.
VALUES = {OUT: "<out>", AT: "<at>"}
#: Name of the only field in the form of `iterate` that has no names.
UNNAMED = ""


@dataclass(frozen=True)
class Binding:
    """The parameters of a function that get a value."""

    positional: tuple[str, ...]  # names of the values
    keywords: Mapping[str, str]  # by parameter: name of the value
    has_levels: bool = False  # whether time levels of the first value are separate parameters

    @property
    def names(self) -> set[str]:
        return {*self.positional, *self.keywords.values()}

    @property
    def fills_out(self) -> bool:
        return VALUES[OUT] in self.names

    @property
    def reads_at(self) -> bool:
        return VALUES[AT] in self.names

    def bind(self, function: Callable[..., Any], values: Mapping[str, Any]) -> partial[Any]:
        """Return a function without parameters, which has the values of some names."""
        positional = [values[name] for name in self.positional]
        if self.has_levels:
            positional[:1] = positional[0]
        keywords = {to: values[name] for to, name in self.keywords.items()}
        return partial(function, *positional, **keywords)


class BoundFunction(NamedTuple):
    """A function of the user, and the parameters of it that get a value."""

    function: Callable[..., Any]  # of NumPy and CuPy arrays
    binding: Binding


#: Returns a user's function with its binding. Raises `InputError` for unknown parameters.
Bind: TypeAlias = Callable[[Callable[..., Any]], BoundFunction]


def bind_by_position(
    function: Callable[..., Any],
    has_levels: bool,  # whether the field has a list of time levels
    constants: Sequence[str],
    keywords: Collection[str],
) -> Binding:
    """Return the binding of a function of time levels, constants and keywords.

    Raises `InputError` for a keyword in the place of the parameter `out`.
    """
    bound_keywords = {name: name for name in keywords}
    for parameter, name in VALUES.items():
        if has_keyword(function, parameter) and parameter not in bound_keywords:
            bound_keywords[parameter] = name
        elif has_keyword(function, parameter) and parameter == OUT:
            raise InputError(
                f"{OUT}: expected a parameter of the function, which iterate gives the memory to "
                f"fill, got a keyword. Leave it out."
            )
    return Binding((UNNAMED, *constants), bound_keywords, has_levels)


def bind_by_name(function: Callable[..., Any], names: Collection[str]) -> Binding:
    """Return the binding of a function whose parameters are names of values.

    Raises `InputError` if a parameter without a default value is no such name.
    """
    positional: list[str] = []
    keywords: dict[str, str] = {}
    bound = function.keywords if isinstance(function, partial) else {}
    is_leading = True  # whether all parameters so far are passed by position
    for parameter in _parameters(function):
        name, kind = parameter.name, parameter.kind
        if kind is Parameter.VAR_KEYWORD:
            used = {*keywords, *bound, *positional}
            keywords |= {name: name for name in names if name not in used}
        elif kind is Parameter.VAR_POSITIONAL:
            is_leading = False
        elif name in bound or name not in (*names, OUT, AT):
            is_leading = False
            if name not in bound and parameter.default is Parameter.empty:
                raise _unknown(function, name, names)
        elif kind is Parameter.KEYWORD_ONLY or not is_leading:
            if kind is Parameter.POSITIONAL_ONLY:
                raise _unknown(function, name, names)
            keywords[name] = VALUES.get(name, name)
        else:
            positional.append(VALUES.get(name, name))
    return Binding(tuple(positional), keywords)


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return [*signature(function).parameters.values()]
    except (TypeError, ValueError):
        raise InputError(
            f"expected a function whose parameters have the names of fields and constants, got "
            f"{describe_function(function)}, whose parameters Python cannot list. Wrap it: "
            f"lambda u: func(u)."
        ) from None


def _unknown(function: Callable[..., Any], name: str, names: Collection[str]) -> InputError:
    return InputError(
        f"expected parameters with the names of fields, constants and keywords, {[*names]}, or "
        f"{OUT!r} or {AT!r}, got parameter {name!r} of {describe_function(function)}. Rename it, "
        f"or give it a default value."
    )


# Functions whose kernels may be replayed in place of further calls.
#
# Such a function depends on its arguments alone, and changes nothing but its results: it has no
# counter, no random numbers, no output. Its code shows this, and the code of the functions that it
# calls. The rules refuse some functions that would do, such as methods: these are called.

#: Packages whose functions keep no state, apart from their modules of random numbers.
_PACKAGES = frozenset({"cupy", "cupyx", "numpy", "scipy", "math", "operator", "_operator"})
#: Modules that draw random numbers, or use files; functions, methods and classes that write files.
_STATEFUL = frozenset({
    *("random", "stats", "io", "save", "savez", "savez_compressed", "save_npz", "savetxt"),
    *("tofile", "dump", "memmap", "open_memmap"),
})  # fmt: skip
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
_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME"})
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_replayable(function: Callable[..., Any]) -> bool:
    """Return whether a function is known to depend on its arguments alone."""
    return _is_plain(function, set())


def is_constant(value: Any) -> bool:
    """Return whether no function can change an argument: a number, a text, or an array.

    The first step finds functions that write into arrays.
    """
    is_array = _package(type(value)) in _PACKAGES and type(value).__name__ == "ndarray"
    is_tuple = type(value) is tuple and all(map(is_constant, value))
    return is_array or is_tuple or isinstance(value, _CONSTANT)


def _is_plain(value: Any, visited: set[int]) -> bool:
    """Return whether a value that a function uses neither changes nor has a state."""
    if isinstance(value, _CONSTANT) or id(value) in visited:
        return True
    visited.add(id(value))
    if type(value) in (tuple, frozenset):
        return all(_is_plain(element, visited) for element in value)
    if type(value) is functools.partial:
        parts = value.func, value.args, tuple(value.keywords.values())
        return not vars(value) and all(_is_plain(part, visited) for part in parts)
    if isinstance(value, functools._lru_cache_wrapper):
        return _is_plain(value.__wrapped__, visited)
    if _is_kernel(value) or _is_of_library(value):
        return True
    if type(value) is FunctionType:
        return _is_plain_function(value, visited)
    return False


def _is_plain_function(function: FunctionType, visited: set[int]) -> bool:
    code = function.__code__
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values += closure_values(function)
    if code.co_flags & _GENERATORS or vars(function):
        return False
    if not all(_is_plain(value, visited) for value in values):
        return False
    return all(_is_plain_code(inner_code, function, visited) for inner_code in codes_in(code))


def _is_plain_code(code: CodeType, function: FunctionType, visited: set[int]) -> bool:
    outer = function.__code__.co_freevars
    before: str | None = None  # the attribute that the previous instruction reads
    for instruction in dis.get_instructions(code):
        name, kind = instruction.argval, instruction.opname
        if kind in _STORES:
            return False
        if kind in ("STORE_DEREF", "DELETE_DEREF") and name in outer:
            return False
        if kind == "IMPORT_NAME" and not _is_stateless(name):
            return False
        if before in _STATEFUL:
            return False
        before = None
        if kind in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            before = name
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            is_global = name in function.__globals__
            if not is_global and name not in _BUILTINS:
                return False
            if is_global and not _is_plain(function.__globals__[name], visited):
                return False
    return True


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code, and those of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


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
    if isinstance(value, ModuleType):
        return _is_stateless(value.__name__)
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType):
        return False  # a method of an object
    is_known = isinstance(value, (type, FunctionType, BuiltinFunctionType))
    return is_known and _is_stateless(f"{value.__module__}.{value.__name__}")


def _is_stateless(module: str) -> bool:
    package, *submodules = module.split(".")
    return package in _PACKAGES and _STATEFUL.isdisjoint(submodules)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None)).partition(".")[0]
