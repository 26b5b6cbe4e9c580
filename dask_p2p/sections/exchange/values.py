"""Values as bytes: numbers, arrays, tuples and dicts of these, and any other object.

A value becomes a *description*, with the shapes and dtypes, and the bytes of its arrays, which are
not copied if they are contiguous. A receiver makes the value from both. Other objects are pickled,
with the memory of their arrays out of band.
"""

from __future__ import annotations

import pickle
import struct
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from dask_p2p.errors import InputError
from dask_p2p.geometry import round_up
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.wire.frames import (
    ALIGNMENT,
    HEADER,
    LABEL,
    ROOM_BYTES,
    VALUE,
    inline_start,
    pad_parts,
)
from dask_p2p.sections.wire.mailbox import MOST_BYTES
from dask_p2p.types import Array, DType

NUMBER_KINDS = "biufcmM"
BYTE_KINDS = f"{NUMBER_KINDS}SUV"  # of dtypes whose elements are bytes
_PYTHON = {bool: "?", int: "<i8", float: "<f8", complex: "<c16"}
_KEYS = str, int  # types of a dict's keys
_HOST_BYTES = bytes, memoryview
_BYTE = np.dtype(np.uint8)
#: Classes of arrays that are their elements alone. The class of any other array goes with it.
_ARRAYS = np.ndarray, np.memmap

_PARSER = Lock()  # CPython 3.11 raises SystemError if threads parse at the same time
# A description is the text of nested tuples, which `parse_literal` reads.
# - ("array", dtype, shape, is in Fortran's order, is on the GPU)
# - ("number", dtype) is a scalar of NumPy, ("float", dtype) a number of Python.
# - ("tuple", descriptions), ("dict", keys, descriptions)
# - ("object", sizes) is a pickle, and the buffers that belong to it


class Encoded(NamedTuple):
    """A value as bytes."""

    description: bytes
    parts: list[Any]  # bytes of its arrays and numbers; of a device's arrays see `on_device`

    @property
    def on_device(self) -> list[Any]:
        return [part for part in self.parts if not isinstance(part, _HOST_BYTES)]

    @property
    def in_host_memory(self) -> list[Any]:
        return [part for part in self.parts if isinstance(part, _HOST_BYTES)]

    def on_host(self, device: Host) -> Encoded:
        return Encoded(self.description, [in_host_memory(part, device) for part in self.parts])


def encoded(value: Any, device: Host, name: str = "value") -> Encoded:
    """Return a value as bytes, which are those of the value itself where possible.

    Arrays of the device stay in its memory: see `Encoded.on_host`. Raises `InputError` if an object
    cannot be pickled.
    """
    parts: list[Any] = []
    return Encoded(_text(_described(value, device, name, parts)), parts)


def decoded(
    description: bytes, data: Any, device: Host, lent: Sequence[Array] | None = None
) -> Any:
    """Return a value from its description and the bytes of its arrays, each one aligned.

    Arrays are views of `data` if that is an array. `lent` are the bytes of the device's arrays, if
    they are not in `data`.
    """
    spec = _spec(description)
    at, lent_arrays = 0, iter(lent or ())

    def leaf(dtype: DType, shape: Sequence[int], is_on_device: bool = False) -> Array:
        nonlocal at
        size_bytes = dtype.itemsize * prod(shape)
        if is_on_device and lent is not None and size_bytes:
            array: Array = next(lent_arrays).view(dtype).reshape(shape)
            return array
        part = data[at : at + size_bytes]
        at += round_up(size_bytes, ALIGNMENT)
        if not isinstance(part, np.ndarray):
            part = np.frombuffer(bytearray(part), np.uint8)
        return part.view(dtype).reshape(shape) if size_bytes else np.empty(shape, dtype)

    return _build(spec, leaf, device)


def copied(value: Any, device: Host) -> Any:
    """Return a value as another rank would receive it."""
    message = encoded(value, device)
    data = np.frombuffer(bytearray().join(pad_parts(message.in_host_memory)), np.uint8)
    lent = [part.copy() for part in message.on_device]
    return decoded(message.description, data, device, lent)


def as_numbers(value: Any) -> Array:
    """Return a value as a NumPy array, which holds an object if the value is ragged."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)


def leaves(value: Any) -> list[Any]:
    """Return the numbers and arrays of a value, in order."""
    if isinstance(value, tuple):
        return [leaf for element in value for leaf in leaves(element)]
    if isinstance(value, dict):
        return [leaf for element in value.values() for leaf in leaves(element)]
    return [value]


def with_leaves(value: Any, new: Sequence[Any]) -> Any:
    """Return a value with other numbers and arrays in their places."""
    new_leaves = iter(new)
    return map_leaves(value, lambda _: next(new_leaves))


def map_leaves(value: Any, function: Callable[[Any], Any], sequences: Any = tuple) -> Any:
    """Return a value with its elements replaced by the results of a function."""
    if isinstance(value, sequences):
        return sequence_like(value, [map_leaves(x, function, sequences) for x in value])
    if isinstance(value, dict):
        return {key: map_leaves(x, function, sequences) for key, x in value.items()}
    return function(value)


def sequence_like(value: Any, items: Sequence[Any]) -> Any:
    """Return a list or tuple of the class of another one, with other items."""
    make: Any = getattr(type(value), "_make", type(value))  # of a named tuple
    return make(items)


def is_array(value: Any, device: Host) -> bool:
    """Return whether a value is an array whose elements are bytes, and no more than its elements.

    So are NumPy's numbers, and arrays of the device.
    """
    if device.holds(value):
        return True
    if type(value) not in _ARRAYS and not isinstance(value, np.generic):
        return False
    return value.dtype.kind in BYTE_KINDS and not value.dtype.hasobject


def is_stackable(value: Any, device: Host) -> bool:
    """Return whether all leaves of a value are numbers, or arrays of numbers."""
    return all(
        type(leaf) is not int or -(2**63) <= leaf < 2**63
        if type(leaf) in _PYTHON
        else is_array(leaf, device) and leaf.dtype.kind in NUMBER_KINDS
        for leaf in leaves(value)
    )


def _described(value: Any, device: Host, name: str, parts: list[Any]) -> tuple[Any, ...]:
    kind = type(value)
    if kind in _PYTHON:
        return _number(value, kind, name, parts)
    if kind is tuple:
        return ("tuple", tuple(_described(element, device, name, parts) for element in value))
    if kind is dict and all(type(key) in _KEYS for key in value):
        elements = tuple(_described(value[key], device, name, parts) for key in value)
        return ("dict", tuple(value), elements)
    if not is_array(value, device):
        return _pickled(value, name, parts)
    if isinstance(value, np.generic):
        parts.append(value.tobytes())
        return ("number", _descr(value.dtype))
    is_on_device = device.holds(value)
    is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    parts.append(_bytes_of(value.transpose() if is_fortran else value, is_on_device))
    return ("array", _descr(value.dtype), value.shape, is_fortran, is_on_device)


def _number(value: Any, kind: type, name: str, parts: list[Any]) -> tuple[Any, ...]:
    try:
        parts.append(np.array(value, _PYTHON[kind]).tobytes())
    except OverflowError:
        return _pickled(value, name, parts)
    return (kind.__name__, _PYTHON[kind])


def _pickled(value: Any, name: str, parts: list[Any]) -> tuple[Any, ...]:
    """Append the pickle of a value, and the buffers of its arrays, to the parts."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        try:
            data = pickle.dumps(value, 5, buffer_callback=buffers.append)
        except Exception:  # its class is in the user's program
            buffers.clear()
            data = cloudpickle.dumps(value, 5, buffer_callback=buffers.append)
        blocks = [data, *(buffer.raw() for buffer in buffers)]
    except Exception as exc:
        raise InputError(
            f"{name}: expected a value that can be pickled, got {type(value).__name__}: {exc}. "
            f"Send the numbers, arrays and texts in it."
        ) from None
    parts += blocks
    return ("object", tuple(map(len, blocks)))


def in_host_memory(part: Any, device: Host) -> Any:
    """Return bytes in host memory, from a part of a value."""
    return part if isinstance(part, _HOST_BYTES) else memoryview(device.to_host(part))


def _bytes_of(array: Array, is_on_device: bool) -> Any:
    if not array.size:
        return b""
    if is_on_device:
        contiguous: Any = array if array.flags.c_contiguous else array.copy()  # in C's order
        return contiguous.reshape(-1).view(np.uint8)
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _build(spec: Any, leaf: Callable[..., Array], device: Host) -> Any:
    kind = spec[0]
    if kind == "array":
        _, dtype, shape, is_fortran, is_on_device = spec
        array = leaf(dtype, shape[::-1] if is_fortran else shape, is_on_device)
        array = array.T if is_fortran else array
        return device.module.asarray(array) if is_on_device else array
    if kind == "number":
        return leaf(spec[1], ())[()]
    if kind == "tuple":
        return tuple(_build(element, leaf, device) for element in spec[1])
    if kind == "dict":
        return {key: _build(element, leaf, device) for key, element in zip(*spec[1:], strict=True)}
    if kind == "object":
        data, *buffers = [leaf(_BYTE, (size_bytes,)) for size_bytes in spec[1]]
        return pickle.loads(data, buffers=buffers)
    return leaf(spec[1], ()).item()


@lru_cache(1024)
def _text(spec: tuple[Any, ...]) -> bytes:
    return repr(spec).encode()


def parse_literal(text: str) -> Any:
    """Return the value of a Python literal, as `ast.literal_eval`, from any thread."""
    with _PARSER:
        return literal_eval(text)


@lru_cache(1024)
def _spec(description: bytes) -> Any:
    return _with_dtypes(parse_literal(description.decode()))


@lru_cache(1024)
def plain_array(description: bytes) -> tuple[DType, tuple[int, ...]] | None:
    """Return the dtype and shape of one array in C's order in host memory; else None."""
    kind, *fields = _spec(description)
    return (fields[0], fields[1]) if kind == "array" and not any(fields[2:]) else None


def _with_dtypes(spec: Any) -> Any:
    kind, *fields = spec
    if kind == "tuple":
        return (kind, [_with_dtypes(element) for element in fields[0]])
    if kind == "dict":
        return (kind, fields[0], [_with_dtypes(element) for element in fields[1]])
    if kind == "object":
        return spec
    descr = parse_literal(fields[0]) if fields[0].startswith("[") else fields[0]
    return (kind, descr_to_dtype(descr), *fields[1:])


@lru_cache(256)
def _descr(dtype: DType) -> str:
    return dtype.str if dtype.names is None and dtype.shape == () else repr(dtype_to_descr(dtype))


# Small values as bytes: numbers and arrays whose messages fit in a slot.
#
# A message of a few bytes takes about as long as the calls that make it. So the values that are
# most frequent are made here with few calls, into the same bytes as by `values`.

_KINDS = "biufc"


_NUMBERS: dict[Any, struct.Struct] = {
    bool: struct.Struct("<?"),
    int: struct.Struct("<q"),
    float: struct.Struct("<d"),
}
_BY_DESCRIPTION = {encoded(kind(), HOST).description: packing for kind, packing in _NUMBERS.items()}


def small_frame(value: Any, tag: int, communicator: int) -> bytes | None:
    """Return the bytes of a message with a value; None for other values than small ones."""
    kind: Any = type(value)
    data = value
    try:
        if (packing := _NUMBERS.get(kind)) is not None:
            data, around = packing.pack(value), _around(kind, None, tag, communicator)
        elif kind is np.ndarray:
            around = _around(value.dtype, value.shape, tag, communicator)
        else:
            return None
        return None if around is None else b"".join((around[0], data, around[1]))
    except (struct.error, TypeError, BufferError):  # too large, or in another order of memory
        return None


@lru_cache(1024)
def _around(
    kind: Any,  # dtype of an array, or type of a number
    shape: tuple[int, ...] | None,  # of an array
    tag: int,
    communicator: int,
) -> tuple[bytes, bytes] | None:
    """Return a message's bytes before and after the elements; None if they do not fit in a slot."""
    dtype = np.dtype(kind)
    size_bytes = prod(shape or ()) * dtype.itemsize
    if dtype.kind not in _KINDS or size_bytes > MOST_BYTES:
        return None
    description, _ = encoded(kind() if shape is None else np.empty(shape, dtype), HOST)
    if len(description) > ROOM_BYTES:
        return None
    if len(description) + size_bytes > ROOM_BYTES:
        label = LABEL.pack(VALUE, communicator, len(description))
        return HEADER.pack(tag, size_bytes, label + description), b""
    start = inline_start(tag, communicator, description)
    return start, bytes(HEADER.size - len(start) - size_bytes)


class LastOut:
    """The array that the last message filled: a loop of messages mostly fills it again.

    It is one that has its own memory, as a view would keep the memory of a large array.
    """

    def __init__(self) -> None:
        self._out: Any = None
        self._tag, self._begun, self._where = -1, b"", slice(0)
        self._memory = memoryview(bytearray())

    def fill(self, out: Any, tag: int, frame: bytes) -> bool:
        """Fill the array if it is `out`, and was filled with such a message; return whether."""
        if out is not self._out or tag != self._tag or not frame.startswith(self._begun):
            return False
        self._memory[:] = frame[self._where]
        return True

    def set(self, out: Any, tag: int, frame: bytes, at: int) -> None:
        """Take an array, which was filled from the bytes of a message from `at` on."""
        if out.base is None and out.flags.c_contiguous and out.size:
            self._out, self._tag, self._begun = out, tag, frame[:at]
            self._where = slice(at, at + out.nbytes)
            self._memory = memoryview(out.reshape(-1).view(np.uint8))


def decoded_small(description: bytes, data: bytes, out: Any, device: Host) -> Any:
    """Return a value from its description and bytes: `out`, if that is an array like it."""
    if (packing := _BY_DESCRIPTION.get(description)) is not None:
        return packing.unpack_from(data)[0]
    if (like := plain_array(description)) is None:
        return decoded(description, data, device)
    dtype, shape = like
    if type(out) is np.ndarray and out.dtype == dtype and out.shape == shape:
        out[...] = np.ndarray(shape, dtype, data)
        return out
    return np.ndarray(shape, dtype, bytearray(data))
