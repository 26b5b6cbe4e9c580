"""Checkpoints in files: all ranks write their local blocks, and rank 0 records the end."""

from __future__ import annotations

import dis
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.base import is_dask_collection

from dask_p2p.errors import InputError
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import Leaf, State
from dask_p2p.sections.iterate.fields import Scalars
from dask_p2p.sections.iterate.local_fields import LocalField, LocalFields
from dask_p2p.sections.iterate.output.checkpoints import (
    ATTRIBUTES,
    CheckpointFolder,
    Parts,
    fingerprint,
    fingerprint_of_same,
)
from dask_p2p.sections.iterate.output.groups import Folder, create_arrays, created, plain
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.sections.iterate.output.specs import store_chunks

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.specs import CheckpointArguments


_SERIES = "series."  # start of the names of the arrays of series


class CheckpointFiles(CheckpointFolder):
    """The checkpoints in files of the fields of one rank."""

    def __init__(
        self,
        spec: CheckpointArguments,
        chunks: tuple[int, ...],  # of the arrays
        ctx: Context,
        local: LocalFields,
        scalars: Scalars,
        series: Series,
        settings: Callable[[], Mapping[str, str]],  # of the run, by name
    ) -> None:
        self._chunks, self._local, self._scalars, self._series = chunks, local, scalars, series
        initial = {n: fingerprint(ctx.device, part, field.box) for n, part, field in self._levels()}
        for name, value in scalars.values.items():
            initial[name] = fingerprint_of_same(ctx.device, np.asarray(value), ctx.rank)
        for name, block, box, counts in local.constant_arrays():
            initial[name] = fingerprint(ctx.device, block, box) if counts else np.uint64(0)
        super().__init__(spec, ctx, initial, settings() if ctx.rank == 0 else {})

    def _levels(self) -> Iterator[tuple[str, Any, LocalField]]:
        """Yield the name of each array, its local block, and its field."""
        for name, field in self._local.fields.items():
            for number, level in enumerate(field.levels if not field.spec.is_constant else ()):
                yield f"{name}.{number}" if field.spec.is_list else name, level.inner, field

    def _shapes(self) -> dict[str, Any]:
        """Return the shape and dtype of each array."""
        shapes = {name: (field.shape, field.spec.dtype) for name, _, field in self._levels()}
        return shapes | {name: ((), number.dtype) for name, number in self._scalars.values.items()}

    def _program(self) -> dict[str, Any]:
        return {"format": ATTRIBUTES["format"], "arrays": plain(self._shapes())}

    def _details(self) -> dict[str, Any]:
        return {"records": self._series.kinds}

    def _check(self, record: Mapping[str, Any]) -> None:
        saved, kinds = record["records"], self._series.kinds
        names = [name for name, kind in kinds.items() if saved.get(name, kind) != kind]
        if names:
            raise InputError(
                f"record: expected records of the same steps, shape and dtype as in the checkpoint "
                f"at {self}, {saved}, got {kinds}. Give {', '.join(names)} another name, or the "
                f"checkpoint another path."
            )

    def _load(self, group: Any, record: Mapping[str, Any]) -> np.uint64:
        parts, series = Parts(), dict[str, Any]()
        for name, block, field in self._levels():
            self.ctx.device.copy_from_host(block, parts.read(group, name, field.box))
        counts = self.ctx.rank == 0  # values that all ranks have
        for name in self._scalars.values:
            self._scalars.update({name: parts.read(group, name, counts=counts)[()]})
        for name in record["records"]:
            series[name] = parts.read(group, f"{_SERIES}{name}", counts=counts)
        self._series.resume(series, int(record["step"]))
        return parts.fingerprint

    def _report(self, step: int, record: Mapping[str, Any], damage: str, is_first: bool) -> None:
        super()._report(step, record, damage, is_first)
        if new := sorted(self._series.kinds.keys() - record["records"].keys()):
            self._warn(
                f"record: the run resumes at step {step} of {self}, which has no values of "
                f"{', '.join(new)}. Their series have NaN, or 0 for integers, for the steps "
                f"before. Give the records in the first run."
            )

    def _prepare(self) -> None:
        self._series.combine()

    def _create(self, folder: Folder) -> None:
        shapes = self._shapes()
        group = created(folder, shapes, ATTRIBUTES)
        fields = {name: shapes[name] for name, _, _ in self._levels()}
        create_arrays(group, fields, self._chunks)

    def _fill(self, group: Any) -> np.uint64:
        parts = Parts()
        for name, block, field in self._levels():
            parts.write(group, name, self.ctx.device.to_host(block), field.box)
        if self.ctx.rank == 0:
            for name, value in self._scalars.values.items():
                parts.create(group, name, np.asarray(value))
            for name, values in self._series.values.items():
                parts.create(group, f"{_SERIES}{name}", values)
        return parts.fingerprint


# Checkpoints in files of a state: values that change in a loop of `Context.steps`.
#
# Arrays of the local block's shape are parts of one array of the store, so any number of ranks may
# resume. Numbers are the same on all ranks. Other values, such as series and generators, are stored
# once if they are the same on all ranks. If they differ, as many ranks must resume.

DIVIDED, NUMBER, OWN = "divided", "number", "of each rank"


class StateValues:
    """The values of a rank's state, with names for a store.

    Parameters
    ----------
    ctx : Context
        The rank.
    state : State
        The values.
    """

    def __init__(self, ctx: Context, state: State) -> None:
        self._ctx, self._state, self.grid = ctx, state, ctx.grid_of().ranks
        leaves = state.leaves()
        self.names = _array_names([*leaves])
        divided = np.array([self._is_divided(leaf) for leaf in leaves.values()], bool)
        on_all = ctx.allreduce(divided, "all") if divided.size else divided
        self.kinds = [
            DIVIDED if is_divided else NUMBER if leaf.kind in ("number", "python") else OWN
            for leaf, is_divided in zip(leaves.values(), on_all, strict=True)
        ]

    def _is_divided(self, leaf: Leaf) -> bool:
        return leaf.kind == "array" and leaf.array.shape == self.grid.shape(self._ctx.rank)

    def leaves(self) -> dict[str, Leaf]:
        """Return the current values by name. Raises `InputError` if one has another kind now."""
        leaves = self._state.leaves()
        for (text, leaf), kind in zip(leaves.items(), self.kinds, strict=True):
            if kind == DIVIDED and not self._is_divided(leaf):
                raise InputError(
                    f"state: expected {text} of the local block's shape, "
                    f"{self.grid.shape(self._ctx.rank)}, as before the first step, got "
                    f"{leaf.array.shape}. Keep its shape."
                )
        return dict(zip(self.names, leaves.values(), strict=True))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of the current values in host memory, by name."""
        copies = {}
        for name, leaf in self.leaves().items():
            copies[name] = np.empty(leaf.array.shape, leaf.array.dtype)
            self._ctx.device.copy_to_host(copies[name], leaf.array)
        return copies

    def fingerprints(self) -> dict[str, np.uint64]:
        """Return fingerprints of this rank's parts, by name; none of values of each rank."""
        fingerprints, ctx = {}, self._ctx
        for (name, leaf), kind in zip(self.leaves().items(), self.kinds, strict=True):
            if kind == DIVIDED:
                fingerprints[name] = fingerprint(ctx.device, leaf.array, ctx.box)
            elif kind == NUMBER:
                fingerprints[name] = fingerprint_of_same(ctx.device, leaf.array, ctx.rank)
        return fingerprints


class StateFiles(CheckpointFolder):
    """The checkpoints in files of one rank's state."""

    def __init__(self, spec: CheckpointArguments, ctx: Context, state: State) -> None:
        self._state, self._values = state, StateValues(ctx, state)
        super().__init__(spec, ctx, self._values.fingerprints())
        self._kinds = dict(zip(self._values.names, self._values.kinds, strict=True))
        self._chunks = store_chunks(self._values.grid.chunks)
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}  # copies for the next checkpoint
        self._differing = set[str]()  # names of those that differ between ranks

    def _shapes(self) -> dict[str, Any]:
        """Return the shape in the store, and the dtype, of each value."""
        global_shape, kinds = tuple(map(sum, self._values.grid.chunks)), self._kinds
        return {
            name: (global_shape if kinds[name] == DIVIDED else (), leaf.array.dtype)
            for name, leaf in self._values.leaves().items()
        }

    def _program(self) -> dict[str, Any]:
        shapes, kinds = self._shapes(), self._kinds
        divided = {
            name: shape_and_dtype
            for name, shape_and_dtype in shapes.items()
            if kinds[name] == DIVIDED
        }
        return {"format": ATTRIBUTES["format"], "values": kinds, "arrays": plain(divided)}

    def _details(self) -> dict[str, Any]:
        return {"ranks": self.ctx.size if self._differing else None, "own": [*self._differing]}

    def _check(self, record: Mapping[str, Any]) -> None:
        if record["ranks"] not in (None, self.ctx.size):
            raise InputError(
                f"ranks: expected {record['ranks']} ranks, as the checkpoint at {self} has values "
                f"that differ between ranks, got {self.ctx.size}. Give ranks={record['ranks']}."
            )

    def _load(self, group: Any, record: Mapping[str, Any]) -> np.uint64:
        parts, values = Parts(), []
        for name, kind in self._kinds.items():
            if kind == DIVIDED:
                values.append(parts.read(group, name, self.ctx.box))
            elif name in record["own"]:
                values.append(parts.read(group, self._rank_name(name)))
            else:
                values.append(parts.read(group, name, counts=self.ctx.rank == 0))
        self._state.fill(values)
        return parts.fingerprint

    def _prepare(self) -> None:
        """Copy the values. Raises `InputError` for numbers that differ between ranks."""
        self._arrays = self._values.arrays()
        self._differing = self._compared()
        for name, number in self._arrays.items():
            if self._kinds[name] != NUMBER:
                continue
            every = self.ctx.allgather(np.frombuffer(number.tobytes(), np.uint8), ragged=True)
            if any(rank_number.tobytes() != every[0].tobytes() for rank_number in every):
                raise InputError(
                    f"state: expected numbers that are the same on all ranks, as checkpoint= "
                    f"requires, got {name}, which differs. Give an array of one element, "
                    f"np.array([...]): each rank has its own."
                )

    def _compared(self) -> set[str]:
        """Return the names of values of each rank that are not the same on all of them."""
        values = {n: array for n, array in self._arrays.items() if self._kinds[n] == OWN}
        if not values:
            return set()
        digests = [
            blake2b(f"{a.dtype.str}{a.shape}".encode() + a.tobytes(), digest_size=16).digest()
            for a in values.values()
        ]
        digest_rows = np.frombuffer(b"".join(digests), np.uint8).reshape(len(values), -1)
        every = self.ctx.allgather(digest_rows)
        is_same = (every == every[0]).all(axis=(0, 2)).tolist()
        return {name for name, same in zip(values, is_same, strict=True) if not same}

    def _create(self, folder: Folder) -> None:
        shapes = self._shapes()
        divided = {
            name: shape_and_dtype
            for name, shape_and_dtype in shapes.items()
            if self._kinds[name] == DIVIDED
        }
        create_arrays(created(folder, shapes, ATTRIBUTES), divided, self._chunks)

    def _fill(self, group: Any) -> np.uint64:
        parts = Parts()
        for name, array in self._arrays.items():
            if self._kinds[name] == DIVIDED:
                parts.write(group, name, array, self.ctx.box)
            elif name in self._differing:
                parts.create(group, self._rank_name(name), array)
            elif self.ctx.rank == 0:
                parts.create(group, name, array)
        self._arrays = {}
        return parts.fingerprint

    def _rank_name(self, name: str) -> str:
        return f"{name}.rank-{self.ctx.rank}"


def _array_names(texts: list[str]) -> list[str]:
    """Return names of arrays in a store for the texts of a state's values.

    >>> _array_names(["u", "v[0]", "fields['h']"])
    ['u', 'v.0', 'fields.h']
    """
    names = [re.sub(r"\W+", ".", text).strip(".") for text in texts]
    is_unique = len({*names}) == len(names) and all(names)
    return names if is_unique else [f"value-{number}" for number, _ in enumerate(texts)]


# The settings of a run, as texts that a later run compares: functions and their arguments.
#
# A text depends on what a function computes with: its bytecode and constants, and the values of its
# closure, of its defaults, and of the global variables that it reads, user's functions among them.
# It depends neither on lines, files and comments, nor on the process and its hash seed. Of a dict,
# a module or an object with attributes the text has the entries that the functions name, if they
# name any: so it does not depend on ``params["steps"]``.

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
