"""The function of `iterate`: calls it, and checks the values that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dask.utils import has_keyword

from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.sections.api.graph import shape_of
from dask_p2p.sections.exchange.halo import HaloPart
from dask_p2p.sections.exchange.recorder import check_kept
from dask_p2p.types import Array


@dataclass(frozen=True)
class StepFunction:
    """The user's function, called with parts of the fields and constants of one step."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    has_until: bool  # whether the function also returns numbers

    @cached_property
    def fills_out(self) -> bool:
        """True if the function fills a parameter named `out`."""
        return bool(has_keyword(self.function, "out"))

    def __call__(
        self,
        given: Sequence[Any],  # parts of fields, then constants
        out: Array,  # memory for the result
        part: HaloPart,  # part of the newest field
    ) -> tuple[Any, ...]:
        """Fill `out`; return the numbers for `until`.

        Raises
        ------
        BlockMismatchError
            If the function returns other values than one array and numbers.
        InputError
            If the function writes into its fields or constants.
        """
        if self.fills_out:
            return self.numbers(self.call(given, out), out)
        with explained_writes():
            returned = self.function(*given, **self.kwargs)
        new, *numbers = returned if isinstance(returned, tuple) and returned else (returned,)
        _check_numbers(numbers, self.has_until)
        _replace(out, new, part)
        return tuple(numbers)

    def call(self, given: Sequence[Any], out: Array) -> Any:
        """Call a function that fills an array; return the value that it returns."""
        with explained_writes():
            return self.function(*given, out=out, **self.kwargs)

    def numbers(self, returned: Any, out: Array) -> tuple[Any, ...]:
        """Return the numbers among the values of a function that has filled `out`.

        The first value may be `out` itself, or None.
        """
        values = returned if isinstance(returned, tuple) else (returned,)
        if values and (values[0] is None or _is_same_memory(values[0], out)):
            values = values[1:]
        _check_numbers(values, self.has_until)
        return values


@contextmanager
def explained_writes() -> Iterator[None]:
    """Explain errors of writes into read-only fields and constants, with the remedy."""
    try:
        yield
    except (TypeError, ValueError) as exc:
        text = str(exc)
        if "read-only" not in text and "readonly" not in text:
            raise
        raise InputError(
            f"expected a function that only reads its fields and constants, got one that writes "
            f"into them: {text}. Write into a copy, u = u.copy(), or into the parameter out. "
            f"Declare arrays read-only where a compiled function declares types."
        ) from exc


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
                f"array of shape {shape}. Several fields are time levels: the new array becomes "
                f"the newest field. Stack coupled fields along an axis of their own, "
                f"x = da.stack([u, v]).rechunk({{0: -1}}), and return one array."
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


def _replace(
    out: Array,  # memory for the new local block, or a part of it
    new: Any,  # the returned array
    part: HaloPart,  # part of the newest field that was passed to the function
) -> None:
    """Copy a returned array, with or without halo, into `out`."""
    shape, seen = shape_of(new, type(out)), part.data
    if shape == seen.shape:
        new = new[part.inner]
    elif shape != out.shape:
        raise BlockMismatchError(
            f"expected an array of shape {out.shape}, or {seen.shape} with halo, from the "
            f"function, got {shape}. Return such an array, or fill a parameter named out."
        )
    check_kept(new, out.dtype, "return")
    out[...] = new
