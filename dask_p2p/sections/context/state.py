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
from math import inf
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from dask_p2p.backends.base import check_plain
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, round_up
from dask_p2p.sections.comparison import contents_digest
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
# that resumed from a checkpoint would begin with the first `t` again. The code of the loop shows
# that `t` is bound again. Contents, such as those of a list that grows, are compared by digests.

#: Operations on local variables: one, or two in one.
_LOCAL = re.compile(r"(LOAD|STORE)_(?:FAST|DEREF)")
_HIDES = "LOAD_FAST_AND_CLEAR"  # hides a variable from a comprehension that has its name, too
_HAS_SNAPSHOT = sys.version_info < (3, 13)  # whether `f_locals` is a copy that the frame keeps
_SCRATCH_SHARE = 64  # an array with a smaller share of the state's elements is no scratch memory


def local_contents(state: State, frame: FrameType | None) -> dict[str, tuple[int, bytes]]:
    """Return the identities and digests of the contents of local variables, by name.

    Parts of the state have no digest. Large arrays that the function does not read after its loop
    are scratch memory, whose contents do not count.
    """
    leaves = state.leaves().values()
    parts = [*vars(state).values(), *(leaf.array for leaf in leaves)]
    scratch_size = max((leaf.array.size for leaf in leaves), default=0) / _SCRATCH_SHARE
    read_names, contents = {name for _, name in _accesses(frame, is_after=True)}, {}
    for name, value in _local_variables(frame).items():
        owner = value if (base := getattr(value, "base", None)) is None else base
        counts = name in read_names or isinstance(value, FunctionType)
        least_size = inf if counts else scratch_size
        is_array = isinstance(value, (np.ndarray, np.generic, state._device.module.ndarray))
        is_scratch = value.size >= least_size if is_array else hasattr(value, "dtype")
        has_none = is_scratch or any(part is owner for part in parts)
        digest = b"" if has_none else contents_digest(value, state._device, least_size)
        contents[name] = id(value), digest
    return contents


def carried_names(
    state: State, frame: FrameType | None, before: Mapping[str, tuple[int, bytes]]
) -> list[str]:
    """Return the names of variables that have changed since the start, and that steps read first.

    A view that is bound again does not count: its array does.
    """
    first, variables = dict[str, str](), _local_variables(frame)
    for verb, name in _accesses(frame):
        first.setdefault(name, verb)

    def is_changed(name: str, identity: int, digest: bytes) -> bool:
        old_identity, old_digest = before.get(name, (identity, digest))
        is_rebound = identity != old_identity and getattr(variables[name], "base", None) is None
        return is_rebound or bool(digest and old_digest and digest != old_digest)

    contents = local_contents(state, frame)
    changed = [name for name, content in contents.items() if is_changed(name, *content)]
    return [name for name in changed if first.get(name, "LOAD") == "LOAD"]


def _local_variables(frame: FrameType | None) -> dict[str, Any]:
    names = {} if frame is None else dict(frame.f_locals)
    if frame and _HAS_SNAPSHOT and frame.f_code.co_flags & CO_OPTIMIZED and not sys.gettrace():
        frame.f_locals.clear()  # the copy would keep arrays that the function drops
    return names


def _accesses(frame: FrameType | None, is_after: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the accesses to local variables in the body of a loop, or after it: verb and name."""
    instructions = [*dis.get_instructions(frame.f_code)] if frame else []
    # Python 3.12 is in the cache behind the operation.
    before = [one for one in instructions if frame and one.offset <= frame.f_lasti]
    if not before or before[-1].opname != "FOR_ITER":
        return
    start, stop = before[-1].offset, before[-1].argval
    for instruction in instructions:
        is_chosen = instruction.offset >= stop if is_after else start < instruction.offset < stop
        verbs, names = _LOCAL.findall(instruction.opname), instruction.argval
        if is_chosen and verbs:
            verbs = ["HIDE"] if instruction.opname == _HIDES else verbs
            yield from zip(verbs, names if isinstance(names, tuple) else (names,), strict=True)
