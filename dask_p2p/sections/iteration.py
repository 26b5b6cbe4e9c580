"""What a member of `iterate` does, for all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from dask.utils import has_keyword

from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import Box, box_size
from dask_p2p.plans.members import Members
from dask_p2p.plans.rims import rims
from dask_p2p.sections.context import Context
from dask_p2p.sections.devices import Host
from dask_p2p.sections.estimate import SectionEstimate, iterated
from dask_p2p.sections.graph import Shares, shape_of
from dask_p2p.sections.halo import Padded, Part, Pending
from dask_p2p.sections.saved import Period
from dask_p2p.types import Array, DType

__all__ = ["Iteration"]

_MARK = b"\xa5"  # bytes of what is not filled


@dataclass(frozen=True)
class Iteration:
    """What each member does, for all steps."""

    function: Callable[..., Any]
    depths: tuple[tuple[tuple[int, int], ...], ...]  # of each field
    steps: int
    dtype: DType
    boundary: tuple[Any, ...]
    corners: bool
    overlap: bool | str
    exchange: str
    constants: tuple[tuple[bool, Any], ...]  # whether it is the next array, and what it is if not
    until: Callable[..., bool] | None
    check_every: int
    period: int | str | None
    kwargs: Mapping[str, Any]

    def __call__(self, ctx: Context, shares: Shares) -> tuple[Array, ...]:
        fields, spare = self._fields(ctx, shares)
        constants = self._constants(ctx, shares)
        first, period = ctx.restore(*(field.inner for field in fields)), Period(self.period)
        ctx.progress.steps = self.steps
        for field in fields:
            ctx.halo(field)
        overlaps = self.overlap
        if overlaps == "auto":
            overlaps = spare.exchange.is_worth_hiding
        pending: Pending | None = None
        mark = self._marked(spare.inner)
        for step in range(first + 1, self.steps + 1):
            for box in _boxes(fields[0], pending):
                numbers = self._apply(box, fields, spare, constants)
            if mark is not None:
                _check_filled(spare.inner, mark, ctx.device)
                mark = None
            fields, spare = [spare, *fields[:-1]], fields[-1]
            ctx.progress.step = step
            ctx.device.keep_up(step)
            if self._is_asked(step) and self._is_done(ctx, numbers):
                break
            if step < self.steps:
                if overlaps and not self._is_asked(step + 1):  # numbers are of a whole share
                    pending = ctx.halo_begin(fields[0])
                else:
                    pending = None
                    ctx.halo(fields[0])
                if ctx.is_due(period, step):
                    ctx.checkpoint(step, *(field.inner for field in fields))
        return tuple(field.inner for field in fields)

    def _apply(
        self, box: Box, fields: list[Padded], spare: Padded, constants: list[Any]
    ) -> Sequence[Any]:
        """Fill a box of the share to come; return the numbers that the function gives."""
        parts = [field.part(box, depth) for field, depth in zip(fields, self.depths, strict=True)]
        where = parts[0].where
        given = [part.data for part in parts]
        for value, (is_share, _) in zip(constants, self.constants, strict=True):
            given.append(value[where] if is_share else value)
        out = spare.inner[where]
        if self._fills_out:
            returned = self.function(*given, out=out, **self.kwargs)
            return returned if isinstance(returned, tuple) else (returned,)
        returned = self.function(*given, **self.kwargs)
        new, *numbers = returned if isinstance(returned, tuple) and returned else (returned,)
        _replace(out, new, parts[0])
        return numbers

    @cached_property
    def _fills_out(self) -> bool:
        return bool(has_keyword(self.function, "out"))

    def _marked(self, out: Array) -> Any:
        """Fill what the function has to fill with what no function makes, and return that.

        None for small elements, of which each pattern of bits may be meant.
        """
        if not self._fills_out or self.dtype.kind not in "iufcmM" or self.dtype.itemsize < 4:
            return None
        mark = np.frombuffer(_MARK * self.dtype.itemsize, self.dtype)[0]
        out[...] = mark
        return mark

    def _is_asked(self, step: int) -> bool:
        """Return whether `until` is asked after a step."""
        return self.until is not None and step % self.check_every == 0

    def _is_done(self, ctx: Context, numbers: Sequence[Any]) -> bool:
        assert self.until is not None
        if not numbers or any(number is None for number in numbers):
            raise BlockMismatchError(
                "expected numbers for until= beside what the function fills or returns, got none. "
                "Return them."
            )
        return bool(self.until(*map(ctx.allreduce, numbers)))

    def _fields(self, ctx: Context, shares: Shares) -> tuple[list[Padded], Padded]:
        """Return the fields, with memory for their rims, and memory for the field to come."""
        what = self._widest, self.boundary, self.corners, self.dtype
        spare = ctx.padded(None, *what, exchange=self.exchange)
        fields = [Padded(spare.exchange) for _ in self.depths]
        for number, field in enumerate(fields):
            shares.copy_into(number, field.inner)
        return fields, spare

    @property
    def _widest(self) -> tuple[tuple[int, int], ...]:
        """A field gets its rims when it is the newest, and keeps them: so wide are all."""
        by_axis = zip(*self.depths, strict=True)
        return tuple((max(b for b, _ in sides), max(a for _, a in sides)) for sides in by_axis)

    def estimate(
        self, found: SectionEstimate, members: Members, rank: int, inputs: Sequence[DType]
    ) -> SectionEstimate:
        """Return what one member has in memory, and sends; `found` is what any function's has."""
        own = rims(members, rank, self._widest, self.boundary, self.corners)
        fields = len(self.depths)
        return iterated(found, own, fields, inputs[fields:], self.dtype, self.period is not None)

    def _constants(self, ctx: Context, shares: Shares) -> list[Any]:
        numbers, kinds = iter(range(len(self.depths), len(shares))), ctx.device.module.ndarray

        def own(constant: Any) -> Any:
            """Return a copy of an array: the function may write into it, and run again."""
            return constant.copy() if isinstance(constant, kinds) else constant

        return [shares.copy(next(numbers)) if of else own(value) for of, value in self.constants]


def _boxes(field: Padded, pending: Pending | None) -> Iterator[Box]:
    """Yield boxes of a share when they can be computed, those first that need no rims."""
    if pending is None:
        yield tuple((0, length) for length in field.inner.shape)
        return
    interior, *frames = field.exchange.boxes
    if box_size(interior):
        yield interior
    pending.wait()
    yield from frames


def _check_filled(out: Array, mark: Any, device: Host) -> None:
    """Refuse what a function has not filled: it would be what was there some steps ago."""
    if left := int(device.module.count_nonzero(out == mark)):
        raise BlockMismatchError(
            f"expected the function to fill its parameter out, of shape {out.shape}, but it left "
            f"{left} of {out.size} elements as they were. Write to all of them, out[...] = ..."
        )


def _replace(out: Array, new: Any, part: Part) -> None:
    """Copy what a function has returned, with or without rims.

    Parameters
    ----------
    out
        Memory for the new share, or a part of it.
    new
        What the function has returned.
    part
        Of the newest field, as the function has seen it.
    """
    shape, seen = shape_of(new, type(out)), part.data
    if shape == seen.shape:
        new = new[part.inner]
    elif shape != out.shape:
        raise BlockMismatchError(
            f"expected an array of shape {out.shape}, or {seen.shape} with rims, from the "
            f"function, got {shape}. Return one, or fill a parameter named out."
        )
    if not np.can_cast(new.dtype, out.dtype, "same_kind"):
        raise BlockMismatchError(
            f"expected an array that becomes {out.dtype} from the function, got {new.dtype}. Say "
            f"what the fields are to be by dtype=..."
        )
    out[...] = new
