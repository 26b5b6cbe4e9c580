"""Variables of a function that refer to arrays of its state: names, attributes and items.

After ``u = s.u`` a function may change `u` in place. But ``u = u + 1`` binds the name to a new
array, and the state `s` keeps the old one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from dask_p2p.errors import InputError
from dask_p2p.sections.context.state import State
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
