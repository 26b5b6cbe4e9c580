"""References of a function to the arrays that a loop saves: names, attributes and items.

When ranks run again, the loop restores the saved arrays in place. So these arrays must be the
function's state in each step. ``x = x + 1`` binds the name to a new array, and leaves the saved one
unchanged.
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
    """References to saved arrays, in a frame and its callers.

    Parameters
    ----------
    arrays : sequence of array
        The saved arrays.
    frame : FrameType
        The frame that passed them to a loop.
    """

    def __init__(self, arrays: Sequence[Array], frame: FrameType | None) -> None:
        self._arrays = arrays
        self._references: list[tuple[CodeType, Array, list[Reference]]] = []
        for code, names in _frames(frame):
            found = [*_references(code, names)]
            for array in arrays:
                references = [reference for reference, value in found if value is array]
                if references:
                    self._references.append((code, array, references))

    def check(self, frame: FrameType | None) -> None:
        """Refuse a function that has replaced a saved array by another array.

        Parameters
        ----------
        frame : FrameType
            The frame that continues the loop.

        Raises
        ------
        InputError
            If the name of a saved array is now bound to another saved array. Also if a function no
            longer refers to a saved array, and one of its references now holds another array of
            that shape.
        """
        frames = dict(_frames(frame))
        for code, array, references in self._references:
            if code in frames:
                self._check(
                    array, [(reference, reference.value(frames[code])) for reference in references]
                )

    def _check(self, array: Array, now: Sequence[tuple[Reference, Any]]) -> None:
        is_lost = all(value is not array for _, value in now)
        for reference, value in now:
            is_other = value is not array and any(value is other for other in self._arrays)
            is_new = is_lost and getattr(value, "shape", None) == array.shape
            if is_new or (is_other and reference.text == reference.name):
                raise InputError(
                    f"save: expected the same arrays in all steps, but {reference.text} is no "
                    f"longer the saved array. Change it in place, {reference.text}[...] = ..., or "
                    f"save it yourself: ctx.restore({reference.text}) before a loop of your own, "
                    f"and ctx.checkpoint(step, {reference.text}) in it."
                )


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code and names of running functions, from a frame out to this package."""
    seen = set[CodeType]()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] != _OWN:
        if frame.f_code not in seen:  # the innermost call of a recursive function
            seen.add(frame.f_code)
            yield frame.f_code, _names(frame)
        frame = frame.f_back


def _names(frame: FrameType) -> dict[str, Any]:
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
    if issubclass(kind, (type, ModuleType, FunctionType)):
        return {}
    with suppress(AttributeError):
        found = object.__getattribute__(value, "__dict__")
        return found if isinstance(found, dict) else {}
    return {}
