"""The functions of `iterate`: calls them, and checks the values that they return.

Arrays in host memory refuse writes of functions that should only read them. On a GPU, and in
another library's arrays over the same memory, checksums before and after the first call find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.geometry import Box, box_size
from dask_p2p.sections.api.outputs import shape_of
from dask_p2p.sections.checks import can_refuse, check_kept, refuse_writes
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray, HaloExchange, HaloPart, Pending
from dask_p2p.sections.iterate.functions import OUT, UNNAMED, VALUES, Binding
from dask_p2p.sections.iterate.local_fields import LocalField
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
        return self.binding.fills_out

    @cached_property
    def is_named(self) -> bool:
        """True if fields have names: the function returns them in a mapping."""
        return self.fields != (UNNAMED,)

    def bind(self, values: Mapping[str, Any], outs: Outs) -> Callable[[], Any]:
        """Return the function with its arguments; the memory to fill is one of them."""
        if not self.fills_out:
            return self.binding.bind(self.function, values)
        out = SimpleNamespace(**outs) if self.is_named else outs[UNNAMED]
        return self.binding.bind(self.function, {**values, VALUES[OUT]: out})

    def call(self, values: Mapping[str, Any], outs: Outs) -> Any:
        """Call the function; return the value that it returns.

        Raises `InputError` if the function writes into its fields or constants.
        """
        with explain_writes():
            return self.bind(values, outs)()

    def fill(
        self,
        device: Host,
        values: Mapping[str, Any],
        outs: Outs,
        parts: Mapping[str, HaloPart],  # by name: the newest level of the field
    ) -> Returned:
        """Call the function, and put new blocks into `outs`; return all that it returns."""
        if self.fills_out:
            return self.read_filled(self.call(values, outs), outs)
        returned = self.read_returned(self.call(values, {}))
        for name, new in returned.blocks.items():
            replace_block(device, outs[name], new, parts[name])
        return returned

    def read_returned(self, value: Any) -> Returned:
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
            received = list(value) if isinstance(value, Mapping) else type(value).__name__
            raise BlockMismatchError(
                f"expected a mapping of new blocks from the function, with some of the fields "
                f"{list(names)}, got {received}. Return {{{names[0]!r}: ...}}."
            )
        blocks = {name: value[name] for name in value if name in self.fields}
        return Returned(blocks, (), {name: value[name] for name in value if name in self.scalars})

    def read_filled(self, value: Any, outs: Outs) -> Returned:
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
            received = list(value) if isinstance(value, Mapping) else type(values[0]).__name__
            name = (*self.fields, *self.scalars)[0]
            raise BlockMismatchError(
                f"expected a function that fills its parameter out, out.{name}[...] = "
                f"..., and returns None or fields that are numbers, {list(self.scalars)}, got "
                f"{received}. Return nothing else, or leave out the parameter out."
            )
        return NOTHING


def _is_same_memory(value: Any, out: Array) -> bool:
    if value is out:
        return True
    for name in ("__cuda_array_interface__", "__array_interface__"):
        out_interface, interface = (getattr(array, name, None) for array in (out, value))
        if out_interface is not None and interface is not None:
            return bool(out_interface["data"] == interface["data"] and value.shape == out.shape)
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
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        is_number = isinstance(value, (bool, int, float, complex)) or kind in set("biufc")
        if value is not None and not is_number:
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


def replace_block(
    device: Host,
    out: Array,  # memory for the new local block, or a part of it
    new: Any,  # the returned array
    part: HaloPart,  # part of the newest field that was passed to the function
) -> None:
    """Copy a returned array, with or without halo, into `out`."""
    shape, part_shape = shape_of("the value of the function", new, type(out)), part.data
    if shape == part_shape.shape:
        new = new[part.inner]
    elif shape != out.shape:
        raise BlockMismatchError(
            f"expected an array of shape {out.shape}, or {part_shape.shape} with halo, from the "
            f"function, got {shape}. Return such an array, or fill a parameter named out."
        )
    if type(new) is not type(out) or new.dtype != out.dtype:
        check_kept(new, out.dtype, "return")
    device.assign(out, new)


def raise_explained(exc: Exception) -> NoReturn:
    """Raise an error with the remedy if a write into read-only memory was refused, else `exc`."""
    text = str(exc)
    if "read-only" not in text and "readonly" not in text:
        raise exc
    raise InputError(
        f"expected a function that only reads its fields and constants, got one that writes "
        f"into them: {text}. Write into a copy, u = u.copy(), or into the parameter out. "
        f"Declare arrays read-only where a compiled function declares types."
    ) from exc


@contextmanager
def explain_writes() -> Iterator[None]:
    """Explain errors of writes into read-only fields and constants, with the remedy."""
    try:
        yield
    except (TypeError, ValueError) as exc:
        raise_explained(exc)


class Reader:
    """A function of fields that is called after steps: it must not change them."""

    def __init__(self, device: Any, function: Callable[..., Any]) -> None:
        self._device, self._is_checked = device, can_refuse(device, function)

    def __call__(self, bound: partial[Any]) -> Any:
        """Call the function with its arguments; return its value.

        Raises `InputError` if the function writes into its fields or constants.
        """
        arguments = () if self._is_checked else (*bound.args, *bound.keywords.values())
        with refuse_writes(self._device, arguments), explain_writes():
            value = bound()
        self._is_checked = True
        return value


@dataclass(frozen=True)
class CallArrays:
    """Arrays of one call of a function, for a box of the local block."""

    values: dict[str, Any]  # arguments of the user's function
    function: Callable[[], Any]  # the user's function with them
    outs: dict[str, Array]  # memory for new blocks, by field
    parts: dict[str, HaloPart]  # of the newest level of each changed field
    reads_scalars: bool  # whether an argument is a number, which changes from step to step


class Call:
    """A phase at one position in the cycle."""

    def __init__(
        self,
        phase: Phase,
        changed: list[str],  # names of the fields that it changes
        reads: frozenset[str],  # names of the fields whose halos are updated before
        halo_arrays: list[HaloArray],  # of these fields
        exchange: HaloExchange | None,  # updates them
        device: Host,  # of the fields
        arguments: Callable[[Binding, Box], dict[str, Any]],  # of its function, by name
        fields: Mapping[str, LocalField],
        scalars: Mapping[str, Any],  # the newest numbers
    ) -> None:
        self.phase, self.changed, self.reads = phase, changed, reads
        self.halo_arrays, self.exchange, self._device = halo_arrays, exchange, device
        self._arguments, self._fields, self._scalars = arguments, fields, scalars
        self._arrays: dict[Box, CallArrays] = {}
        self.changed_fields = [fields[name] for name in changed]
        self.outdated = {field.spec.name for field in self.changed_fields if field.has_halo}
        self.is_settled = False  # whether its function is checked, and `is_overlapped` known
        self.is_overlapped = False  # whether the interior is computed while halos are in flight

    def _arrays_for(self, box: Box) -> CallArrays:
        values = self._arguments(self.phase.binding, box)
        parts = {name: self._fields[name].parts(box)[0] for name in self.changed}
        outs = {
            name: self._fields[name].next_level.inner[part.where] for name, part in parts.items()
        }
        reads_scalars = not self.phase.binding.names.isdisjoint(self._scalars)
        return CallArrays(values, self.phase.bind(values, outs), outs, parts, reads_scalars)

    def apply(self, box: Box) -> Returned:
        """Fill a box of the next local blocks; return the other values of the function."""
        phase, arrays = self.phase, self._arrays.get(box)
        if arrays is None:
            arrays = self._arrays[box] = self._arrays_for(box)
        function = arrays.function
        if arrays.reads_scalars:
            function = phase.bind({**arrays.values, **self._scalars}, arrays.outs)
        try:
            value = function()
        except (TypeError, ValueError) as exc:
            raise_explained(exc)
        if phase.fills_out:
            return NOTHING if value is None else phase.read_filled(value, arrays.outs)
        returned = phase.read_returned(value)
        if returned.blocks.keys() != arrays.outs.keys():
            raise BlockMismatchError(
                f"expected new blocks of the same fields in each step, {self.changed}, got "
                f"{[*returned.blocks]}. Return the same names each time."
            )
        for name, new in returned.blocks.items():
            replace_block(self._device, arrays.outs[name], new, arrays.parts[name])
        return returned._replace(blocks={})  # perhaps views of fields

    def apply_parts(self, boxes: Sequence[Box], pending: Pending) -> Returned:
        """Fill the interior while halos are in flight, and then the boundary parts."""
        interior, *boundary_parts = boxes
        returned = self.apply(interior) if box_size(interior) else NOTHING
        pending.wait()
        for box in boundary_parts:
            returned = self.apply(box)
        return returned
