"""Checks of requests before a worker uses them.

Dask's protocol has already converted the message to Python values. The checks accept only the plain
values that readers send. They refuse texts instead of numbers, fractions, and objects whose own
code would run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dask_p2p.geometry import Box
from dask_p2p.types import Key

_MOST_DIMENSIONS = 64  # NumPy's limit
_DEEPEST_KEY = 8  # tuples in tuples: hashing deeper ones can exhaust the stack
_LONGEST_KEY = 1000  # parts of one tuple
_MOST_PARTS = 2**16
_LONGEST_TEXT = 10_000  # structured dtypes can be long
_LONGEST_S = 3600


class MalformedRequestError(ValueError):
    """A request has values that no reader sends."""


def checked_key(key: Key, depth: int = 0) -> Any:
    """Return a Dask key: text, bytes, a number, or a tuple of keys."""
    if type(key) in (str, bytes, int, float):
        return key
    if type(key) is not tuple or depth == _DEEPEST_KEY or len(key) > _LONGEST_KEY:
        raise MalformedRequestError(f"key: expected a Dask key, got {type(key).__name__}")
    for part in key:
        checked_key(part, depth + 1)
    return key


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape: a short sequence of non-negative integers."""
    lengths = _integers("shape", shape)
    if any(length < 0 for length in lengths):
        raise MalformedRequestError("shape: expected no negative lengths")
    return lengths


def checked_strides(strides: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides: an integer for each axis of a block of this shape."""
    steps = _integers("strides", strides)
    if len(steps) != len(shape):
        raise MalformedRequestError(f"strides: expected {len(shape)}, got {len(steps)}")
    return steps


def checked_box(box: Any, shape: tuple[int, ...]) -> Box:
    """Return a box within a block of this shape."""
    ends = [_integers("box", pair) for pair in _sequence("box", box)]
    if any(len(pair) != 2 for pair in ends):
        raise MalformedRequestError("box: expected a start and a stop for each axis")
    lies_in = len(ends) == len(shape) and all(
        0 <= start <= stop <= length for (start, stop), length in zip(ends, shape, strict=True)
    )
    if not lies_in:
        raise MalformedRequestError(f"box {_short(ends)} does not lie in a block of {shape}")
    return tuple((start, stop) for start, stop in ends)


def checked_blocks(blocks: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Return keys and shapes of blocks."""
    pairs = _pairs("blocks", blocks)
    return [(checked_key(key), checked_shape(shape)) for key, shape in pairs]


def checked_parts(parts: Any, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, Box]]:
    """Return block numbers, and boxes within those blocks."""
    pairs, last = _pairs("parts", parts), len(shapes) - 1
    numbers = [checked_integer("block", number, 0, last) for number, _ in pairs]
    return [(n, checked_box(box, shapes[n])) for n, (_, box) in zip(numbers, pairs, strict=True)]


def checked_integer(name: str, value: Any, least: int, most: int) -> int:
    """Return an integer within bounds."""
    _check_type(name, value, "an integer", int)  # not bool either
    if not least <= value <= most:
        raise MalformedRequestError(f"{name}: expected {least} to {most}")
    return int(value)


def checked_seconds(name: str, value: Any) -> float:
    """Return a duration in seconds, at most an hour."""
    if type(value) not in (int, float) or not 0 <= value <= _LONGEST_S:
        raise MalformedRequestError(f"{name}: expected 0 to {_LONGEST_S} seconds")
    return float(value)


def checked_text(name: str, value: Any) -> str:
    """Return a short text."""
    if type(value) is not str or len(value) > _LONGEST_TEXT:
        raise MalformedRequestError(f"{name}: expected a short text, got {type(value).__name__}")
    return value


def checked_bool(name: str, value: Any) -> bool:
    """Return a truth value."""
    _check_type(name, value, "true or false", bool)
    return bool(value)


def reject_unknown(unknown: Iterable[str]) -> None:
    """Refuse arguments that no reader sends."""
    if names := sorted(map(str, unknown)):
        raise MalformedRequestError(f"unknown arguments: {_short(names)}")


def _pairs(name: str, value: Any) -> Sequence[Any]:
    pairs = _sequence(name, value, _MOST_PARTS)
    if any(type(pair) not in (tuple, list) or len(pair) != 2 for pair in pairs):
        raise MalformedRequestError(f"{name}: expected pairs")
    return pairs


def _integers(name: str, values: Any) -> tuple[int, ...]:
    for value in _sequence(name, values):
        _check_type(name, value, "an integer", int)
        if not -(2**63) <= value < 2**63:
            raise MalformedRequestError(f"{name}: expected integers of 64 bits")
    return tuple(values)


def _sequence(name: str, value: Any, most: int = _MOST_DIMENSIONS) -> Sequence[Any]:
    _check_type(name, value, "a sequence", tuple, list)
    if len(value) > most:
        raise MalformedRequestError(f"{name}: expected at most {most}, got more")
    sequence: Sequence[Any] = value
    return sequence


def _check_type(name: str, value: Any, expected: str, *types: type) -> None:
    """Refuse a value of another type, also of a subclass, whose own code would run."""
    if type(value) not in types:
        raise MalformedRequestError(f"{name}: expected {expected}, got {type(value).__name__}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:196]} ..."
