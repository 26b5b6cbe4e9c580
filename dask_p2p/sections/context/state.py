"""The state of a loop of steps: values by name, as bytes that a later attempt resumes from.

A checkpoint has a *header*, which is the text of each value's kind, dtype and shape, and then the
elements of all values. So values may change their shapes from step to step.
"""

from __future__ import annotations

import dis
import json
import logging
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from dask_p2p.backends.base import check_plain
from dask_p2p.errors import InputError
from dask_p2p.geometry import round_up
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.exchange.values import BYTE_KINDS, parse_literal, sequence_like
from dask_p2p.sections.gang.checkpoints import (
    CHANGED,
    EMPTY,
    OUTSIDE,
    SAME,
    check_state,
    host_arrays,
)
from dask_p2p.types import Array, DType

_LENGTH_BYTES = 8  # of the header's length, in front of it
_ALIGNMENT_BYTES = 64  # of the first array, behind the header
_PYTHON = (bool, int, float, complex)


class Leaf(NamedTuple):
    """One array or number of a state."""

    kind: str  # array, number, python or generator
    array: Array  # on the rank's device


class _Saved(NamedTuple):
    kind: str
    dtype: DType
    shape: tuple[int, ...]


class State:
    """Values that change from step to step, as attributes: see `Context.state`.

    ``s.u = s.u + 1`` and ``s.u += 1`` both change the state `s`.
    """

    __slots__ = ("__dict__", "_device", "_names", "has_copies", "outside")

    def __init__(self, device: Host, values: Mapping[str, Any], has_copies: bool = True) -> None:
        self._device, self.has_copies = device, has_copies
        self.outside: list[str] = []  # names of other values that a loop carries
        for name, value in values.items():
            setattr(self, name, _copied(value, device) if has_copies else value)
        self._names = [*self.leaves()]

    @classmethod
    def of_arrays(cls, device: Host, arrays: Sequence[Array], name: str) -> State:
        """Return the state of a function that changes these arrays in place.

        `name` becomes the name of each by `str.format`, with its number.
        """
        check_state(arrays, device)
        named = {name.format(number): array for number, array in enumerate(arrays)}
        return cls(device, named, has_copies=False)

    def __repr__(self) -> str:
        return f"<State of {', '.join(vars(self))}>"

    def leaves(self) -> dict[str, Leaf]:
        """Return all arrays and numbers, by their texts.

        Raises `InputError` for other values, and `UnsupportedArrayError` for a masked array.
        """
        values = (pair for name, value in vars(self).items() for pair in _values(name, value))
        return {name: _leaf(name, value, self._device) for name, value in values}

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
        text = repr((self.outside, _header(leaves))).encode()
        size_bytes = round_up(_LENGTH_BYTES + len(text), _ALIGNMENT_BYTES)
        length = (size_bytes - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
        header = (length + text).ljust(size_bytes)
        return [_on_device(np.frombuffer(header, np.uint8), self._device)] + [
            of.array for of in leaves
        ]

    def changes(self, saved: memoryview) -> bytes:
        """Compare each value with a checkpoint: `SAME`, `CHANGED` or `EMPTY`.

        One more byte, `OUTSIDE`, follows if the loop carried other values.
        """
        found = []
        self.outside, _ = _text_of(saved)
        for (spec, theirs), own in zip(self._read(saved), self.leaves().values(), strict=True):
            is_same = (spec.kind, spec.dtype, spec.shape) == (
                own.kind,
                own.array.dtype,
                own.array.shape,
            )
            if is_same and theirs.size:
                mine = np.empty(spec.shape, spec.dtype)
                self._device.copy_to_host(mine, own.array)
                is_same = mine.tobytes() == theirs.tobytes()
            found.append(CHANGED if not is_same else SAME if theirs.size else EMPTY)
        return bytes([*found, OUTSIDE] if self.outside else found)

    def load(self, saved: memoryview) -> None:
        """Take over the values of a checkpoint; arrays of the same shape are filled in place."""
        self._take(self._read(saved))

    def fill(self, arrays: Sequence[Array]) -> None:
        """Take over one array in host memory for each value."""
        kinds = [leaf.kind for leaf in self.leaves().values()]
        pairs = zip(kinds, arrays, strict=True)
        self._take([(_Saved(kind, array.dtype, array.shape), array) for kind, array in pairs])

    def _take(self, values: Sequence[tuple[_Saved, Array]]) -> None:
        new = iter(values)
        for name, value in vars(self).items():
            setattr(self, name, _loaded(value, new, self._device))

    def name(self, number: int) -> str:
        """Return the text of a value by its number."""
        return [*self._names, ", ".join(self.outside)][number]

    def _read(self, saved: memoryview) -> list[tuple[_Saved, Array]]:
        """Return the kind, dtype and shape of each value in a checkpoint, and its elements.

        Raises `InputError` for arrays of a function that have other shapes or dtypes.
        """
        (_, found), own = _text_of(saved), [*self.leaves().values()]
        if self.has_copies:
            specs = [_Saved(kind, descr_to_dtype(descr), shape) for kind, descr, shape in found]
        elif found == _header(own):
            specs = [_Saved(kind, array.dtype, array.shape) for kind, array in own]
        else:
            raise InputError(
                f"expected the arrays of the last checkpoint, {found}, got {_header(own)}. Give "
                f"ctx.restore and ctx.checkpoint the same arrays."
            )
        header = (np.dtype(np.uint8), (_LENGTH_BYTES + _length_of(saved),))
        arrays = host_arrays(saved, [header, *((of.dtype, of.shape) for of in specs)])
        return list(zip(specs, arrays[1:], strict=True))


def _length_of(saved: memoryview) -> int:
    return int.from_bytes(saved[:_LENGTH_BYTES], "little")


def _text_of(saved: memoryview) -> Any:
    """Return the names outside of the state of a checkpoint, and its header."""
    text = bytes(saved[_LENGTH_BYTES : _LENGTH_BYTES + _length_of(saved)])
    return parse_literal(text.decode())


def _header(leaves: Iterable[Leaf]) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Return the kind, the description of the dtype, and the shape of each value."""
    return [(of.kind, dtype_to_descr(of.array.dtype), of.array.shape) for of in leaves]


def _copied(value: Any, device: Host) -> Any:
    """Return a value with copies of its arrays, which have no other name in the function."""
    if isinstance(value, dict):
        return {key: _copied(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return sequence_like(value, [_copied(each, device) for each in value])
    return value.copy() if isinstance(value, device.module.ndarray) else value


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each array, number and generator of a value, with its text."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _values(f"{name}[{key!r}]", each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _values(f"{name}[{number}]", each)
    elif isinstance(value, HaloArray):
        yield f"{name}.inner", value.inner
    else:
        yield name, value


def _leaf(name: str, value: Any, device: Host) -> Leaf:
    check_plain(name, value)
    if isinstance(value, np.random.Generator):
        text = json.dumps(value.bit_generator.state, default=lambda array: array.tolist())
        return Leaf("generator", _on_device(np.frombuffer(text.encode(), np.uint8), device))
    is_number = isinstance(value, (*_PYTHON, np.generic))
    array = np.asarray(value) if is_number else value
    is_array = is_number or isinstance(value, device.module.ndarray)
    if not is_array or array.dtype.kind not in BYTE_KINDS or array.dtype.hasobject:
        found = f"{value!r:.60}" if is_number else type(value).__name__
        raise InputError(
            f"state: expected {device.module.__name__} arrays, numbers of 64 bits, halo arrays, "
            f"NumPy generators, or tuples, lists and dicts of these, got {found} as {name}. "
            f"Convert it."
        )
    if is_number:
        kind = "number" if isinstance(value, np.generic) else "python"
        return Leaf(kind, _on_device(array, device))
    return Leaf("array", array)


def _on_device(array: Array, device: Host) -> Array:
    made = device.empty(array.shape, array.dtype)
    device.copy_from_host(made, array)
    return made


def _with_arrays(state: Any) -> Any:
    """Return the state of a bit generator with arrays in the places of lists."""
    if isinstance(state, dict):
        return {key: _with_arrays(each) for key, each in state.items()}
    return np.array(state, np.uint64) if isinstance(state, list) else state


def _loaded(value: Any, new: Iterator[tuple[_Saved, Array]], device: Host) -> Any:
    """Return a value with the arrays and numbers of a checkpoint in their places."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            value[key] = _loaded(value[key], new, device)
        return value
    if isinstance(value, tuple):
        return sequence_like(value, [_loaded(each, new, device) for each in value])
    spec, array = next(new)
    if isinstance(value, HaloArray):
        device.copy_from_host(value.inner, array)
        return value
    if spec.kind == "generator":
        value.bit_generator.state = _with_arrays(json.loads(array.tobytes()))
        return value
    if spec.kind != "array":
        return array[()] if spec.kind == "number" else array.item()
    is_same = isinstance(value, device.module.ndarray) and (
        (value.shape, value.dtype) == (spec.shape, spec.dtype)
    )
    if is_same and getattr(value.flags, "writeable", True):
        device.copy_from_host(value, array)
        return value
    return _on_device(array, device)


# Variables of a function that refer to arrays of its state: names, attributes and items.
#
# After ``u = s.u`` a function may change `u` in place. But ``u = u + 1`` binds the name to a new
# array, and the state `s` keeps the old one.

_OWN = __name__.partition(".")[0]
_CONTAINERS = dict, list, tuple, deque
_MOST_ITEMS = 1000  # of a list or dict that is searched for arrays
_HAS_SNAPSHOT = sys.version_info < (3, 13)  # whether `f_locals` is a copy that the frame keeps


class Reference(NamedTuple):
    """A name in a function, or an attribute or item of its value."""

    code: CodeType  # the function's
    name: str
    key: Any = None
    text: str = ""  # source text of the reference

    def value(self, names: dict[str, Any]) -> Any:
        """Return the current value; None if there is none."""
        value = names.get(self.name)
        return value if self.text == self.name else _inside(value).get(self.key)


class Bindings:
    """Variables that refer to arrays of a state, in a frame and its callers.

    Parameters
    ----------
    state : State
        The state of a loop.
    frame : FrameType
        The frame that passed it to the loop.
    """

    def __init__(self, state: State, frame: FrameType | None) -> None:
        self._state = state
        self.code = None if frame is None else frame.f_code  # of the function with the loop
        self._references: list[tuple[str, Array, list[Reference]]] = []  # by name in the state
        found = [each for code, names in _frames(frame) for each in _references(code, names)]
        for name, leaf in state.leaves().items():
            references = [reference for reference, value in found if value is leaf.array]
            if references and leaf.kind == "array":
                self._references.append((name, leaf.array, references))

    def check(self, frame: FrameType | None) -> None:
        """Refuse a function that works on another array than the state has.

        Parameters
        ----------
        frame : FrameType
            The frame that continues the loop.

        Raises
        ------
        InputError
            If a variable was an array of the state, which still has it, and the variable now is
            another array of that shape.
        """
        frames, leaves = dict(_frames(frame)), self._state.leaves()
        for name, array, references in self._references:
            if leaves[name].array is not array:
                continue
            now = [(each, each.value(frames.get(each.code, {}))) for each in references]
            for reference, value in now:
                is_other = value is not array and getattr(value, "shape", None) == array.shape
                if is_other and not self._may_be_other(reference, value, array, now):
                    raise InputError(self._problem(name, reference.text))

    def _may_be_other(
        self, reference: Reference, value: Any, array: Array, now: list[tuple[Reference, Any]]
    ) -> bool:
        """Return whether a function may go on with the array by another of its names."""
        if self._state.has_copies:
            return False
        others = [of.array for of in self._state.leaves().values()]
        is_swapped = reference.text == reference.name and any(value is other for other in others)
        has_it = any(other is array for each, other in now if each.code is reference.code)
        return has_it and not is_swapped

    def _problem(self, name: str, text: str) -> str:
        if not self._state.has_copies:
            return (
                f"save: expected the same arrays in all steps, but {text} is no longer the saved "
                f"array. Change it in place, {text}[...] = ..., or use ctx.state."
            )
        return (
            f"state: expected {text} to stay the array {name} of the state, as before the loop, "
            f"but it is another array now. Change the state itself, "
            f"s.{name.removesuffix('.inner')} = ..., or rename the variable."
        )


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code and names of running functions, from a frame out to this package."""
    seen = set[CodeType]()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != _OWN:
        if frame.f_code not in seen:  # the innermost call of a recursive function
            seen.add(frame.f_code)
            yield frame.f_code, names_in(frame)
        frame = frame.f_back


def names_in(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a running function by name."""
    names = dict(frame.f_locals)
    if _HAS_SNAPSHOT and frame.f_code.co_flags & CO_OPTIMIZED and sys.gettrace() is None:
        frame.f_locals.clear()  # the copy would keep arrays that the function drops
    return names


def _references(code: CodeType, names: dict[str, Any]) -> Iterator[tuple[Reference, Any]]:
    for name, value in names.items():
        yield Reference(code, name, text=name), value
        has_items = issubclass(type(value), _CONTAINERS)
        for key, inside in _inside(value).items():
            text = f"{name}[{key!r}]" if has_items else f"{name}.{key}"
            yield Reference(code, name, key, text), inside


def _inside(value: Any) -> dict[Any, Any]:
    """Return the items of a list, tuple or dict, or the attributes of an object."""
    kind = type(value)  # `isinstance` would ask a proxy for its class
    if issubclass(kind, _CONTAINERS):
        if len(value) > _MOST_ITEMS:
            return {}
        return value if issubclass(kind, dict) else dict(enumerate(value))
    if issubclass(kind, (type, ModuleType, FunctionType, State)):
        return {}
    with suppress(AttributeError):
        found = object.__getattribute__(value, "__dict__")
        return found if isinstance(found, dict) else {}
    return {}


# Variables that a loop of steps carries from step to step, next to its state.
#
# In ``for _ in ctx.steps(n, s): s.u = s.u + t; t += dt`` the number `t` is not in the state. Ranks
# that resumed from a checkpoint would begin with the first `t` again.

logger = logging.getLogger(__name__)

#: Operations on local variables: one, or two in one.
_LOCAL = re.compile(r"(LOAD|STORE)_(?:FAST|DEREF)")
_HIDES = "LOAD_FAST_AND_CLEAR"  # hides a variable from a comprehension that has its name, too


def carried_values(state: State, code: CodeType | None, frame: FrameType) -> list[str]:
    """Return the names of numbers and arrays that a loop carries, and its state does not have.

    `code` is that of the function with the loop. `frame` has requested the next step: it may be
    that of a progress bar instead.
    """
    if not state.has_copies or frame.f_code is not code:
        return []
    names, own = names_in(frame), [leaf.array for leaf in state.leaves().values()]
    found = [name for name in _read_first(frame) if _is_outside(names.get(name), own)]
    if found:
        logger.warning(
            "The loop of ctx.steps carries %s from step to step, outside of its state. After the "
            "loss of a worker its ranks begin at the start. A run that resumes from files has the "
            "first values. Give them to ctx.state: s.%s.",
            ", ".join(found),
            found[0],
        )
    return found


def _is_outside(value: Any, own: Sequence[Array]) -> bool:
    """Return whether a value is a number, or an array outside of a state."""
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return True
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return is_array and getattr(value, "base", None) is None and all(value is not a for a in own)


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
    loop = [each for each in instructions if each.offset <= frame.f_lasti][-1]
    if loop.opname != "FOR_ITER":
        return
    for each in instructions:
        if loop.offset < each.offset < loop.argval and (verbs := _LOCAL.findall(each.opname)):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            yield from zip(["HIDE"] if each.opname == _HIDES else verbs, names, strict=True)
