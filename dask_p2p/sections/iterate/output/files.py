"""Values for stores: those of `iterate` and of a state, and the settings of a run."""

from __future__ import annotations

import dis
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from dask.base import is_dask_collection

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_slices, split_box, whole_box
from dask_p2p.loading import is_library
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import DIVIDED, NUMBER, OWN, Leaf, SavedValue, State
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.gang.checkpoints import host_arrays
from dask_p2p.sections.iterate.fields import Scalars
from dask_p2p.sections.iterate.functions import codes_in
from dask_p2p.sections.iterate.local_fields import LocalFields
from dask_p2p.sections.iterate.output.groups import CONFIG, open_array
from dask_p2p.sections.iterate.output.series import Series
from dask_p2p.types import Array

SERIES = "series."  # start of the names of the arrays of series


class FieldValues:
    """The values of `iterate` on one rank: fields, numbers and series."""

    def __init__(
        self,
        ctx: Context,
        local: LocalFields,
        scalars: Scalars,
        series: Series,
    ) -> None:
        self._ctx, self._local, self._scalars, self._series = ctx, local, scalars, series

    def newest(self) -> dict[str, SavedValue]:
        """Return the newest level of each field, and the numbers, by the names of the fields."""
        values = {
            name: SavedValue(DIVIDED, field.newest.inner, field.shape, field.box)
            for name, field in self._local.fields.items()
        }
        return values | self._numbers()

    def current(self) -> dict[str, SavedValue]:
        """Return all values of a checkpoint. A collective call of all ranks."""
        self._series.combine()
        series = self._series.values.items()
        records = {SERIES + name: SavedValue(OWN, array, (), ()) for name, array in series}
        return self._levels() | self._numbers() | records

    def _levels(self) -> dict[str, SavedValue]:
        return {
            f"{name}.{number}" if field.spec.is_list else name: SavedValue(
                DIVIDED, level.inner, field.shape, field.box
            )
            for name, field in self._local.fields.items()
            for number, level in enumerate(field.levels if not field.spec.is_constant else ())
        }

    def _numbers(self) -> dict[str, SavedValue]:
        numbers = self._scalars.values.items()
        return {name: SavedValue(NUMBER, np.asarray(value), (), ()) for name, value in numbers}

    def load(self, step: int, values: Iterable[tuple[str, Any]]) -> None:
        """Take over the values of a checkpoint, by name, in host memory."""
        levels, series = self._levels(), dict[str, Any]()
        for name, array in values:
            if name in levels:
                self._ctx.device.copy_from_host(levels[name].array, array)
            elif name in self._scalars.values:
                self._scalars.update({name: array.reshape(())[()]})
            else:
                series[name.removeprefix(SERIES)] = array
        self._series.resume(series, step)

    # --- checkpoints in memory

    def save(self, step: int) -> None:
        """Save all values in memory. A collective call of all ranks."""
        arrays, from_host = [*self._of_all_steps().values()], self._ctx.device.from_host
        assert self._ctx.checkpoints is not None, "they are due"
        self._ctx.checkpoints.save(step, [from_host(array, arrays[0]) for array in arrays])

    def restore(self) -> int:
        """Take over the newest values that `save` has saved; return their step, or 0."""
        arrays = dict[str, Array]()

        def read(saved: memoryview) -> None:
            current = self._of_all_steps()
            specs = [(array.dtype, array.shape) for array in current.values()]
            arrays.update(zip(current, host_arrays(saved, specs), strict=True))

        if step := self._ctx.restore_state(read):
            self.load(step, arrays.items())
        return step

    def _of_all_steps(self) -> dict[str, Array]:  # of shapes that stay, to use memory again
        arrays = {name: value.array for name, value in self._levels().items()}
        arrays |= {name: value.array.reshape(1) for name, value in self._numbers().items()}
        return arrays | {SERIES + name: array for name, array in self._series.results().items()}


class StateValues:
    """The values of a rank's state, with names for a store.

    Arrays of the local block's shape are parts of one array of the store, so any number of ranks
    may resume. Numbers are the same on all ranks. Other values, such as series and generators, are
    stored once if they are the same on all ranks. If they differ, as many ranks must resume.
    """

    def __init__(self, ctx: Context, state: State) -> None:
        self._ctx, self._state, self.grid = ctx, state, ctx.grid_of().ranks
        leaves = state.leaves()
        texts = [re.sub(r"\W+", ".", text).strip(".") for text in leaves]  # fields['h']: fields.h
        is_unique = len({*texts}) == len(texts) and all(texts)
        names = texts if is_unique else [f"value-{n}" for n, _ in enumerate(texts)]
        divided = np.array([self._is_divided(leaf) for leaf in leaves.values()], bool)
        on_all = ctx.allreduce(divided, "all") if divided.size else divided
        self._kinds = {
            name: DIVIDED if is_divided else NUMBER if leaf.kind in ("number", "python") else OWN
            for name, leaf, is_divided in zip(names, leaves.values(), on_all, strict=True)
        }

    def _is_divided(self, leaf: Leaf) -> bool:
        return leaf.kind == "array" and leaf.array.shape == self.grid.shape(self._ctx.rank)

    def current(self) -> dict[str, SavedValue]:
        """Return the current values by name. Raises `InputError` if one has another kind now."""
        leaves, values = self._state.leaves(), dict[str, SavedValue]()
        items = zip(self._kinds.items(), leaves.items(), strict=True)
        for (name, kind), (text, leaf) in items:
            if kind == DIVIDED and not self._is_divided(leaf):
                raise InputError(
                    f"state: expected {text} of the local block's shape, "
                    f"{self.grid.shape(self._ctx.rank)}, as before the first step, got "
                    f"{leaf.array.shape}. Keep its shape."
                )
            shape, box = (self._ctx.shape, self._ctx.box) if kind == DIVIDED else ((), ())
            values[name] = SavedValue(kind, leaf.array, shape, box)
        return values

    def load(self, step: int, values: Iterable[tuple[str, Any]]) -> None:
        """Take over the values of a checkpoint, by name, in host memory."""
        arrays = dict(values)
        self._state.fill([arrays[name] for name in self._kinds])


# Numbers that distinguish the values of arrays, for any division of the arrays between ranks.
#
# A fingerprint is the sum, modulo 2**64, of all words of an array's elements, each times a weight
# that depends on its index in the whole array. So the sum of the fingerprints of all parts is that
# of the whole array::
#
#     fingerprint(x[:5], box 0..5) + fingerprint(x[5:], box 5..9) = fingerprint(x, box 0..9)

_COPIED_ELEMENTS = 2**21  # of one copy from a GPU
_PIECE_ELEMENTS = 2**13  # whose words and weights stay in a cache
_WORD_BYTES = 4, 2, 1  # products of 64-bit words with weights would overflow
# Those of the generator SplitMix64: https://prng.di.unimi.it/splitmix64.c
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MIXING = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
_LAST_SHIFT = 31


def fingerprint(device: Host, block: Array, box: Box) -> np.uint64:
    """Return the fingerprint of a part of an array, which has the bounds `box` in the whole."""
    total = np.zeros((), np.uint64)
    if not box:
        block, box = block.reshape(1), ((0, 1),)
    for copied in split_box(box, _COPIED_ELEMENTS):
        host = device.to_host(block[box_slices(copied, within=box)])
        for piece in split_box(copied, _PIECE_ELEMENTS):
            total += _of_piece(host[box_slices(piece, within=copied)], piece)
    return np.uint64(total)


class Parts:
    """Reads or writes one rank's parts of the arrays of a group, and sums their fingerprints.

    The sum over all ranks is the same for any division of the arrays between ranks. It changes with
    each element, and with the name, dtype and shape of each array.
    """

    def __init__(self) -> None:
        self.fingerprint = np.uint64(0)

    def write(self, group: Any, name: str, block: Array, box: Box) -> None:
        array = open_array(group, name)
        if block.size:
            array[box_slices(box)] = block
        self._add(array, name, block, box)

    def create(self, group: Any, name: str, values: Array) -> None:
        self._add(group.create_array(name, data=values, config=CONFIG), name, values)

    def read(self, group: Any, name: str, box: Box | None = None, counts: bool = True) -> Array:
        """Return a part of an array, by default all of it; it may be one that counts elsewhere."""
        array = group[name]
        block = np.asarray(array[... if box is None else box_slices(box)])
        if counts:
            self._add(array, name, block, box)
        return block

    def _add(self, array: Any, name: str, block: Array, box: Box | None = None) -> None:
        box = whole_box(array.shape) if box is None else box
        text = f"{name} {array.dtype.str} {array.shape}".encode()
        weight = np.uint64(int.from_bytes(blake2b(text, digest_size=8).digest()) | 1)
        part = fingerprint(HOST, block, box) if block.size else np.uint64(0)
        with np.errstate(over="ignore"):
            self.fingerprint += weight * part


def _of_piece(block: Any, box: Box) -> np.uint64:
    block = np.ascontiguousarray(block)
    word_bytes = next(n for n in _WORD_BYTES if block.dtype.itemsize % n == 0)
    weights = [_weights(axis, *bounds) for axis, bounds in enumerate(box)]
    of_words = _weights(len(box), 0, block.dtype.itemsize // word_bytes)
    weights[-1] = np.multiply.outer(weights[-1], of_words).ravel()
    sums = block.view(f"u{word_bytes}").astype(np.uint64)
    for of_axis in reversed(weights):
        sums = sums @ of_axis
    return np.uint64(sums)


def _weights(axis: int, start: int, stop: int) -> Any:
    """Return odd numbers for the indices of an axis."""
    weights = np.arange(start, stop, dtype=np.uint64)
    weights += np.uint64((axis + 1) << 56)  # other numbers for each axis
    weights *= _INCREMENT
    for shift, factor in _MIXING:
        weights ^= weights >> np.uint64(shift)
        weights *= np.uint64(factor)
    weights ^= weights >> np.uint64(_LAST_SHIFT)
    return weights | np.uint64(1)


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
    """Describes functions, and values that they use."""

    def __init__(self, values: Iterable[Any]) -> None:  # all that will be described
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
            if not is_library(value.__name__):
                yield from self._entries(vars(value), may_be_all=False)
        elif isinstance(value, type):
            yield value.__qualname__
            if not is_library(value.__module__):
                yield from map(self, value.__bases__)
                for name, method in sorted(vars(value).items()):
                    if isinstance(method, FunctionType) and name not in _MAKE_OR_COMPARE:
                        yield f"{name} {self(method)}"
        elif getattr(value, "py_func", None):  # compiled by Numba
            yield self(value.py_func)
        elif getattr(value, "__wrapped__", None):  # compiled by JAX, or with a cache
            yield self(value.__wrapped__)
        else:
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                yield reduced
                return
            function, args, state, *iterators = (*reduced, None, None, None)[:5]
            yield from map(self, (function, args, state))
            yield from (self([*iterator]) for iterator in iterators if iterator is not None)

    def _entries(self, values: Mapping[Any, Any], may_be_all: bool = True) -> Iterator[str]:
        names = [name for name in values if isinstance(name, str) and name in self._names]
        if may_be_all and not (self._is_selecting and names):
            names = [*values]
        yield from sorted(f"{self(name)}: {self(values[name])}" for name in names)

    def _function(self, function: FunctionType) -> Iterator[str]:
        yield function.__name__
        code = function.__code__
        if is_library(function.__module__ or "__main__"):
            yield f"{function.__module__}.{function.__qualname__}"
        else:
            has_text = bool(code.co_consts) and code.co_consts[0] == function.__doc__
            yield from self._code(code, code.co_consts[1 if has_text else 0 :])
            instructions = (one for part in codes_in(code) for one in dis.get_instructions(part))
            names = {one.argval for one in instructions if one.opname in _READS_GLOBAL}
            values = function.__globals__
            for name in sorted(names & values.keys()):
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
