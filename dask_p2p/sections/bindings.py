"""The places where a function holds arrays that a loop saves: its names, and attributes and items.

A loop fills the arrays that it was given when members run again. So they must be the function's
state in each step. ``x = x + 1`` binds the name to a new array, and leaves the saved one as it was.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from dask_p2p.errors import InputError
from dask_p2p.types import Array

_OWN = __name__.partition(".")[0]
_CONTAINERS = dict, list, tuple, deque
_MOST_ITEMS = 1000  # of a list or a dict, among which arrays are looked for
_HAS_SNAPSHOT = sys.version_info < (3, 13)  # whether `f_locals` is a copy, which the frame keeps


class Place(NamedTuple):
    """A name of a function, or an attribute or item of its value."""

    code: CodeType  # of the function
    name: str
    key: Any = None
    text: str = ""  # as the function writes it

    def value(self, names: dict[str, Any]) -> Any:
        """Return the value that is there now; None if there is none."""
        value = names.get(self.name)
        return value if self.text == self.name else _inside(value).get(self.key)


class Bindings:
    """Where functions hold arrays, from a frame outwards.

    Parameters
    ----------
    arrays : sequence of array
        The arrays that are saved.
    frame : FrameType
        The frame that gave them to a loop.
    """

    def __init__(self, arrays: Sequence[Array], frame: FrameType | None) -> None:
        self._arrays = arrays
        self._places: list[tuple[CodeType, Array, list[Place]]] = []
        for code, names in _frames(frame):
            found = [*_places(code, names)]
            for array in arrays:
                places = [place for place, value in found if value is array]
                if places:
                    self._places.append((code, array, places))

    def check(self, frame: FrameType | None) -> None:
        """Refuse a function that holds another array in the place of one that is saved.

        Parameters
        ----------
        frame : FrameType
            The frame that goes on with the loop.

        Raises
        ------
        InputError
            If a name of a saved array is bound to another saved one. Also if a function holds the
            array in no place any more, and has another array of its shape there.
        """
        frames = dict(_frames(frame))
        for code, array, places in self._places:
            if code in frames:
                self._check(array, [(place, place.value(frames[code])) for place in places])

    def _check(self, array: Array, now: Sequence[tuple[Place, Any]]) -> None:
        is_lost = all(value is not array for _, value in now)
        for place, value in now:
            is_other = value is not array and any(value is other for other in self._arrays)
            is_new = is_lost and getattr(value, "shape", None) == array.shape
            if is_new or (is_other and place.text == place.name):
                raise InputError(
                    f"save: expected the same arrays in all steps, but {place.text} is now another "
                    f"array than the one that is saved. Change it in place, {place.text}[...] = "
                    f"..., or save it yourself: ctx.restore({place.text}) before a loop of your "
                    f"own, and ctx.checkpoint(step, {place.text}) in it."
                )


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the functions that run, from a frame outwards to this package, with their names."""
    seen = set[CodeType]()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != _OWN:
        if frame.f_code not in seen:  # of a function that calls itself the innermost call
            seen.add(frame.f_code)
            yield frame.f_code, _names(frame)
        frame = frame.f_back


def _names(frame: FrameType) -> dict[str, Any]:
    names = dict(frame.f_locals)
    if _HAS_SNAPSHOT and frame.f_code.co_flags & CO_OPTIMIZED and sys.gettrace() is None:
        frame.f_locals.clear()  # a copy, which would keep arrays that the function drops
    return names


def _places(code: CodeType, names: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    for name, value in names.items():
        yield Place(code, name, text=name), value
        has_items = issubclass(type(value), _CONTAINERS)
        for key, inside in _inside(value).items():
            text = f"{name}[{key!r}]" if has_items else f"{name}.{key}"
            yield Place(code, name, key, text), inside


def _inside(value: Any) -> dict[Any, Any]:
    """Return the items of a list, tuple or dict, or the attributes of an object."""
    kind = type(value)  # a proxy would be asked for its class by `isinstance`
    if issubclass(kind, _CONTAINERS):
        if len(value) > _MOST_ITEMS:
            return {}
        return value if issubclass(kind, dict) else dict(enumerate(value))
    if issubclass(kind, (type, ModuleType, FunctionType)):
        return {}
    with suppress(AttributeError):
        found = object.__getattribute__(value, "__dict__")
        return found if isinstance(found, dict) else {}
    return {}
