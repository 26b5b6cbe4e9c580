"""The functions of `iterate`: calls them, and checks the values that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from dask_p2p.errors import BlockMismatchError
from dask_p2p.sections.api.returned import shape_of
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloPart
from dask_p2p.sections.exchange.recorder import check_kept
from dask_p2p.sections.iterate.functions.binding import OUT, UNNAMED, VALUES, Binding
from dask_p2p.sections.iterate.functions.writes import explained_writes
from dask_p2p.types import Array

Outs = Mapping[str, Array]  # by name of a field: memory for its next values


class Returned(NamedTuple):
    """The values that a function has returned."""

    blocks: Mapping[str, Any] = MappingProxyType({})  # new local blocks by name of the field
    numbers: tuple[Any, ...] = ()  # for `until`
    scalars: Mapping[str, Any] = MappingProxyType({})  # new values of numbers by name


NOTHING = Returned()


@dataclass(frozen=True)
class Phase:
    """One function of a step."""

    function: Callable[..., Any]
    binding: Binding
    fields: tuple[str, ...]  # names of the fields that it may change
    has_until: bool = False  # whether the function also returns numbers
    scalars: tuple[str, ...] = ()  # names of the numbers that it may change

    @cached_property
    def fills_out(self) -> bool:
        """True if the function fills a parameter named `out`."""
        return self.binding.fills_out

    @cached_property
    def is_named(self) -> bool:
        """True if fields have names: the function returns them in a mapping."""
        return self.fields != (UNNAMED,)

    def bound(self, values: Mapping[str, Any], outs: Outs) -> Callable[[], Any]:
        """Return the function with its arguments; the memory to fill is one of them."""
        if not self.fills_out:
            return self.binding.bound(self.function, values)
        out = SimpleNamespace(**outs) if self.is_named else outs[UNNAMED]
        return self.binding.bound(self.function, {**values, VALUES[OUT]: out})

    def call(self, values: Mapping[str, Any], outs: Outs) -> Any:
        """Call the function; return the value that it returns.

        Raises `InputError` if the function writes into its fields or constants.
        """
        with explained_writes():
            return self.bound(values, outs)()

    def fill(
        self,
        device: Host,
        values: Mapping[str, Any],
        outs: Outs,
        parts: Mapping[str, HaloPart],  # by name: the newest level of the field
    ) -> Returned:
        """Call the function, and put new blocks into `outs`; return all that it returns."""
        if self.fills_out:
            return self.filled(self.call(values, outs), outs)
        returned = self.returned(self.call(values, {}))
        for name, new in returned.blocks.items():
            replace_block(device, outs[name], new, parts[name])
        return returned

    def returned(self, value: Any) -> Returned:
        """Return the new blocks and numbers of a function without a parameter `out`.

        Raises `BlockMismatchError` for other values than blocks of its fields and numbers.
        """
        if not self.is_named:
            new, *numbers = value if isinstance(value, tuple) and value else (value,)
            _check_numbers(numbers, self.has_until)
            return Returned({UNNAMED: new}, tuple(numbers))
        if len(self.fields) == 1 and _ndim(value) and not isinstance(value, (list, tuple)):
            return Returned({self.fields[0]: value})
        names = (*self.fields, *self.scalars)
        if not isinstance(value, Mapping) or not value or not {*value} <= {*names}:
            found = list(value) if isinstance(value, Mapping) else type(value).__name__
            raise BlockMismatchError(
                f"expected a mapping of new blocks from the function, with some of the fields "
                f"{list(names)}, got {found}. Return {{{names[0]!r}: ...}}."
            )
        blocks = {name: value[name] for name in value if name in self.fields}
        return Returned(blocks, (), {name: value[name] for name in value if name in self.scalars})

    def filled(self, value: Any, outs: Outs) -> Returned:
        """Return the numbers that a function which has filled `outs` returned.

        The first value may be the memory itself, or None.
        """
        if value is None:
            return NOTHING
        values = value if isinstance(value, tuple) else (value,)
        if not self.is_named:
            if values and (values[0] is None or _is_same_memory(values[0], outs[UNNAMED])):
                values = values[1:]
            _check_numbers(values, self.has_until)
            return Returned({}, values)
        if isinstance(value, Mapping) and {*value} <= {*self.scalars}:
            return Returned({}, (), dict(value))
        if values not in ((None,), ()) and not isinstance(values[0], SimpleNamespace):
            found = list(value) if isinstance(value, Mapping) else type(values[0]).__name__
            name = (*self.fields, *self.scalars)[0]
            raise BlockMismatchError(
                f"expected a function that fills its parameter out, out.{name}[...] = "
                f"..., and returns None or fields that are numbers, {list(self.scalars)}, got "
                f"{found}. Return nothing else, or leave out the parameter out."
            )
        return NOTHING


def _is_same_memory(value: Any, out: Array) -> bool:
    if value is out:
        return True
    names = ("__cuda_array_interface__", "__array_interface__")
    for name in names:
        own, other = getattr(out, name, None), getattr(value, name, None)
        if own is not None and other is not None:
            return bool(own["data"] == other["data"] and value.shape == out.shape)
    return False


def _check_numbers(values: Sequence[Any], has_until: bool) -> None:
    """Raise `BlockMismatchError` for returned values that `until` cannot use."""
    for value in values:
        if _ndim(value):
            shape = getattr(value, "shape", (len(value),))
            raise BlockMismatchError(
                f"expected one new array from the function, and numbers for until=, got another "
                f"array of shape {shape}. Give coupled fields by name, iterate(func, {{'u': u, "
                f"'v': v}}, ...), and return {{'u': ..., 'v': ...}}."
            )
        if value is not None and not _is_number(value):
            raise BlockMismatchError(
                f"expected numbers for until= from the function, got {type(value).__name__}. "
                f"Return plain numbers, float(...)."
            )
    if values and not has_until:
        raise BlockMismatchError(
            f"expected only the new array from the function, got {len(values)} more "
            f"{'value' if len(values) == 1 else 'values'}. Give a function of them as until=, or "
            f"do not return them."
        )


def _ndim(value: Any) -> int:
    return int(getattr(value, "ndim", isinstance(value, (list, tuple))))


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float, complex)):
        return True
    return getattr(getattr(value, "dtype", None), "kind", "") in set("biufc")


def replace_block(
    device: Host,
    out: Array,  # memory for the new local block, or a part of it
    new: Any,  # the returned array
    part: HaloPart,  # part of the newest field that was passed to the function
) -> None:
    """Copy a returned array, with or without halo, into `out`."""
    shape, seen = shape_of("the value of the function", new, type(out)), part.data
    if shape == seen.shape:
        new = new[part.inner]
    elif shape != out.shape:
        raise BlockMismatchError(
            f"expected an array of shape {out.shape}, or {seen.shape} with halo, from the "
            f"function, got {shape}. Return such an array, or fill a parameter named out."
        )
    check_kept(new, out.dtype, "return")
    device.assign(out, new)
