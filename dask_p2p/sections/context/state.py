"""The state of a loop of steps: values by name, as bytes that a later attempt resumes from.

A checkpoint has a *header*, which is the text of each value's kind, dtype and shape, and then the
elements of all values. So values may change their shapes from step to step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from dask_p2p.backends.base import check_plain
from dask_p2p.errors import InputError
from dask_p2p.geometry import round_up
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.exchange.values import BYTE_KINDS, parse_literal, sequence_like
from dask_p2p.sections.gang.checkpoints import host_arrays
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

    __slots__ = ("__dict__", "_device", "_names")

    def __init__(self, device: Host, values: Mapping[str, Any]) -> None:
        self._device = device
        for name, value in values.items():
            setattr(self, name, _copied(value, device))
        self._names = [*self.leaves()]

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
        text = repr(_header(leaves)).encode()
        size_bytes = round_up(_LENGTH_BYTES + len(text), _ALIGNMENT_BYTES)
        length = (size_bytes - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
        header = (length + text).ljust(size_bytes)
        return [_on_device(np.frombuffer(header, np.uint8), self._device)] + [
            of.array for of in leaves
        ]

    def checksums(self) -> dict[str, int]:
        """Return the checksum of each value that has elements, by name."""
        leaves = self.leaves().items()
        return {name: self._device.checksum(leaf.array) for name, leaf in leaves if leaf.array.size}

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

    def _read(self, saved: memoryview) -> list[tuple[_Saved, Array]]:
        """Return the kind, dtype and shape of each value in a checkpoint, and its elements."""
        text = bytes(saved[_LENGTH_BYTES : _LENGTH_BYTES + _length_of(saved)])
        header = parse_literal(text.decode())
        specs = [_Saved(kind, descr_to_dtype(descr), shape) for kind, descr, shape in header]
        before = (np.dtype(np.uint8), (_LENGTH_BYTES + _length_of(saved),))
        arrays = host_arrays(saved, [before, *((spec.dtype, spec.shape) for spec in specs)])
        return list(zip(specs, arrays[1:], strict=True))


def _length_of(saved: memoryview) -> int:
    return int.from_bytes(saved[:_LENGTH_BYTES], "little")


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
