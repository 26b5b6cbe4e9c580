"""The state of a loop of steps: values by name, as bytes that a later attempt resumes from.

A checkpoint has a *header*, which is the text of each value's kind, dtype and shape, and then the
elements of all values. So values may change their shapes from step to step.
"""

from __future__ import annotations

import dis
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from dask_p2p.backends.base import check_plain
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, round_up
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.exchange.values import BYTE_KINDS, map_leaves, parse_literal, sequence_like
from dask_p2p.sections.gang.checkpoints import host_arrays
from dask_p2p.types import Array

_LENGTH_BYTES = 8  # of the header's length, in front of it
_ALIGNMENT_BYTES = 64  # of the first array, behind the header
_PYTHON = (bool, int, float, complex)


class Leaf(NamedTuple):
    """One array or number of a state."""

    kind: str  # array, number, python or generator
    array: Array  # on the rank's device


DIVIDED, NUMBER, OWN = "divided", "number", "of each rank"


class SavedValue(NamedTuple):
    """A value that stores write: a block of a global array, a number, or a value of each rank."""

    kind: str  # DIVIDED, NUMBER or OWN
    array: Array  # on the rank's device
    shape: tuple[int, ...]  # of the global array
    box: Box  # of the rank's block in it


class State:
    """Values that change from step to step, as attributes: see `Context.state`.

    ``s.u = s.u + 1`` and ``s.u += 1`` both change the state `s`.

    See Also
    --------
    dask_p2p.results.Context.steps : Save the state from time to time.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import spmd
    >>> def count(ctx, u):
    ...     s = ctx.state(u=u)
    ...     for _ in ctx.steps(3, s):
    ...         s.u += 1
    ...     return s.u
    >>> spmd(count, da.zeros(2)).compute(scheduler="sync")
    array([3., 3.])
    """

    __slots__ = ("__dict__", "_device", "_names")

    def __init__(self, device: Host, values: Mapping[str, Any]) -> None:
        self._device, kind = device, device.module.ndarray
        for name, value in values.items():
            # Copies of its arrays have no other name in the function.
            copied = map_leaves(
                value, lambda x: x.copy() if isinstance(x, kind) else x, (list, tuple)
            )
            setattr(self, name, copied)
        self._names = [*self.leaves()]

    def __repr__(self) -> str:
        return f"<State of {', '.join(vars(self))}>"

    def leaves(self) -> dict[str, Leaf]:
        """Return all arrays and numbers, by their texts.

        Raises `InputError` for other values, and `UnsupportedArrayError` for a masked array.
        """
        values = (
            pair for name, value in vars(self).items() for pair in _iterate_values(name, value)
        )
        return {name: _make_leaf(name, value, self._device) for name, value in values}

    def check(self) -> dict[str, Leaf]:
        """Return `leaves`; raise `InputError` for other values than those of the beginning."""
        leaves = self.leaves()
        if (names := [*leaves]) != self._names:
            raise InputError(
                f"state: expected the values that ctx.state got, {self._names}, got {names}. Give "
                f"all of them to ctx.state, and let dicts and lists keep their lengths."
            )
        return leaves

    # --- checkpoints

    def arrays(self) -> list[Array]:
        """Return the header and the arrays of a checkpoint."""
        leaves = self.check().values()
        kinds = [(x.kind, dtype_to_descr(x.array.dtype), x.array.shape) for x in leaves]
        text = repr(kinds).encode()
        size_bytes = round_up(_LENGTH_BYTES + len(text), _ALIGNMENT_BYTES)
        length = (size_bytes - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
        header = (length + text).ljust(size_bytes)
        return [_copy_to_device(np.frombuffer(header, np.uint8), self._device)] + [
            leaf.array for leaf in leaves
        ]

    def checksums(self) -> dict[str, int | None]:
        """Return the checksum of each value by name; None without elements."""
        arrays = {name: leaf.array for name, leaf in self.leaves().items()}
        return {name: self._device.checksum(x) if x.size else None for name, x in arrays.items()}

    def load(self, saved: memoryview) -> None:
        """Take over the values of a checkpoint; arrays of the same shape are filled in place."""
        size_bytes = _LENGTH_BYTES + int.from_bytes(saved[:_LENGTH_BYTES], "little")
        header = parse_literal(bytes(saved[_LENGTH_BYTES:size_bytes]).decode())
        specs = [(descr_to_dtype(descr), shape) for _, descr, shape in header]
        _, *arrays = host_arrays(saved, [(np.dtype(np.uint8), (size_bytes,)), *specs])
        self._take([kind for kind, *_ in header], arrays)

    def fill(self, arrays: Sequence[Array]) -> None:
        """Take over one array in host memory for each value."""
        self._take([leaf.kind for leaf in self.leaves().values()], arrays)

    def _take(self, kinds: Sequence[str], arrays: Sequence[Array]) -> None:
        new = iter([*zip(kinds, arrays, strict=True)])
        for name, value in vars(self).items():
            setattr(self, name, _load_value(value, new, self._device))


def _iterate_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each array, number and generator of a value, with its text."""
    if isinstance(value, dict):
        for key, element in value.items():
            yield from _iterate_values(f"{name}[{key!r}]", element)
    elif isinstance(value, (list, tuple)):
        for number, element in enumerate(value):
            yield from _iterate_values(f"{name}[{number}]", element)
    elif isinstance(value, HaloArray):
        yield f"{name}.inner", value.inner
    else:
        yield name, value


def _make_leaf(name: str, value: Any, device: Host) -> Leaf:
    check_plain(name, value)
    if isinstance(value, np.random.Generator):
        text = json.dumps(value.bit_generator.state, default=lambda array: array.tolist())
        return Leaf("generator", _copy_to_device(np.frombuffer(text.encode(), np.uint8), device))
    is_number = isinstance(value, (*_PYTHON, np.generic))
    array = np.asarray(value) if is_number else value
    is_array = is_number or isinstance(value, device.module.ndarray)
    if not is_array or array.dtype.kind not in BYTE_KINDS or array.dtype.hasobject:
        received = f"{value!r:.60}" if is_number else type(value).__name__
        raise InputError(
            f"state: expected {device.module.__name__} arrays, numbers of 64 bits, halo arrays, "
            f"NumPy generators, or tuples, lists and dicts of these, got {received} as {name}. "
            f"Convert it."
        )
    if is_number:
        kind = "number" if isinstance(value, np.generic) else "python"
        return Leaf(kind, _copy_to_device(array, device))
    return Leaf("array", array)


def _copy_to_device(array: Array, device: Host) -> Array:
    device_array = device.empty(array.shape, array.dtype)
    device.copy_from_host(device_array, array)
    return device_array


def _load_value(value: Any, new: Iterator[tuple[str, Array]], device: Host) -> Any:
    """Return a value with the arrays and numbers of a checkpoint in their places."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            value[key] = _load_value(value[key], new, device)
        return value
    if isinstance(value, tuple):
        return sequence_like(value, [_load_value(element, new, device) for element in value])
    kind, array = next(new)
    if isinstance(value, HaloArray):
        device.copy_from_host(value.inner, array)
        return value
    if kind == "generator":
        value.bit_generator.state = json.loads(array.tobytes())
        return value
    if kind != "array":
        return array[()] if kind == "number" else array.item()
    is_same = isinstance(value, device.module.ndarray) and (
        (value.shape, value.dtype) == (array.shape, array.dtype)
    )
    if is_same and getattr(value.flags, "writeable", True):
        device.copy_from_host(value, array)
        return value
    return _copy_to_device(array, device)


# Variables that a loop of steps carries from step to step, next to its state.
#
# In ``for _ in ctx.steps(n, s): s.u = s.u + t; t += dt`` the number `t` is not in the state. Ranks
# that resumed from a checkpoint would begin with the first `t` again.

#: Operations on local variables: one, or two in one.
_LOCAL = re.compile(r"(LOAD|STORE)_(?:FAST|DEREF)")
_HIDES = "LOAD_FAST_AND_CLEAR"  # hides a variable from a comprehension that has its name, too
_HAS_SNAPSHOT = sys.version_info < (3, 13)  # whether `f_locals` is a copy that the frame keeps


def identities(frame: FrameType) -> dict[str, int]:
    """Return the identities of local variables by name."""
    return {name: id(value) for name, value in _local_variables(frame).items()}


def carried_names(state: State, frame: FrameType, before: Mapping[str, int]) -> list[str]:
    """Return the names of numbers and arrays that a loop carries, and its state does not have.

    `frame` is that of the loop, after a step, and `before` has the identities of its variables
    before that step. The names of two arrays of the state may have been swapped.
    """
    variables, arrays = _local_variables(frame), [leaf.array for leaf in state.leaves().values()]

    def is_outside(name: str) -> bool:
        value = variables.get(name)
        if isinstance(value, (bool, int, float, complex, np.generic)):
            return True
        if getattr(value, "base", None) is not None or not hasattr(value, "dtype"):
            return False
        is_in_state = any(value is array for array in arrays)
        return not is_in_state or before.get(name) != id(value)

    return [*filter(is_outside, _read_first(frame))]


def _local_variables(frame: FrameType) -> dict[str, Any]:
    names = dict(frame.f_locals)
    if _HAS_SNAPSHOT and frame.f_code.co_flags & CO_OPTIMIZED and sys.gettrace() is None:
        frame.f_locals.clear()  # the copy would keep arrays that the function drops
    return names


def _read_first(frame: FrameType) -> list[str]:
    """Return the names that the body of a loop reads before it sets them, in their order."""
    first: dict[str, str] = {}
    is_set = set[str]()
    for verb, name in _accesses(frame):
        first.setdefault(name, verb)
        if verb == "STORE":
            is_set.add(name)
    return [name for name, verb in first.items() if verb == "LOAD" and name in is_set]


def _accesses(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Yield the accesses to local variables in the body of a loop: verb and name."""
    instructions = [*dis.get_instructions(frame.f_code)]
    # Python 3.12 is in the cache behind the operation.
    loop = [instruction for instruction in instructions if instruction.offset <= frame.f_lasti][-1]
    if loop.opname != "FOR_ITER":
        return
    for instruction in instructions:
        if loop.offset < instruction.offset < loop.argval and (
            verbs := _LOCAL.findall(instruction.opname)
        ):
            names = (
                instruction.argval
                if isinstance(instruction.argval, tuple)
                else (instruction.argval,)
            )
            yield from zip(["HIDE"] if instruction.opname == _HIDES else verbs, names, strict=True)
