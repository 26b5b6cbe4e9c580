"""Shares with rims, and the exchange that fills these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_size, box_slices
from dask_p2p.ops.rims import unread_value
from dask_p2p.plans.rims import interior_and_frames
from dask_p2p.sections.devices import HOST, Host
from dask_p2p.sections.rim_messages import RimCall
from dask_p2p.sections.rim_windows import RimWindows
from dask_p2p.types import Array


class Part(NamedTuple):
    """A part of a share, and what a stencil reads for it."""

    data: Array  # with its rims
    inner: Any  # where the part is in `data`: slices
    where: Any  # and in the share


class Padded:
    """A member's share with rims around it.

    Attributes
    ----------
    data : numpy.ndarray or cupy.ndarray
        The share with its rims.
    inner : numpy.ndarray or cupy.ndarray
        The share: a view of `data`.
    """

    def __init__(self, exchange: Exchange) -> None:  # what fills the rims of arrays like this one
        self.exchange = exchange
        self.data: Array = exchange.device.zeros(exchange.rims.shape, exchange.dtype)
        self.inner: Array = self.data[box_slices(exchange.rims.inner)]
        self.fill_unread(unread_value(exchange.dtype))
        self._parts: dict[Any, Part] = {}  # each step asks for the same ones

    def fill_unread(self, value: Any) -> None:
        """Set the corners that no exchange fills."""
        for box in self.exchange.rims.unread:
            self.data[box_slices(box)] = value

    @property
    def interior(self) -> Part:
        """What can be computed before rims of other members are there; it may be empty.

        A `Part`: `data`, the part with its rims; slices `inner`, where the part is in that, and
        `where`, where it is in the share.
        """
        return self.part(self.exchange.boxes[0])

    @property
    def frames(self) -> list[Part]:
        """What cannot: two parts for each axis that is divided, or the whole share."""
        return [self.part(box) for box in self.exchange.boxes[1:]]

    def part(self, box: Box, depth: Sequence[tuple[int, int]] | None = None) -> Part:
        """Return a box of the share, with rims that are no wider than given."""
        widths = self.exchange.rims.depth if depth is None else tuple(depth)
        if (box, widths) not in self._parts:
            self._parts[box, widths] = self._part(box, widths)
        return self._parts[box, widths]

    def read_only(self, box: Box, depth: Sequence[tuple[int, int]]) -> Part:
        """Return the same for a function that must not write into it."""
        key = box, tuple(depth), "read-only"
        if key not in self._parts:
            part = self.part(box, depth)
            data = self.exchange.device.read_only(part.data)
            self._parts[key] = part._replace(data=data)
        return self._parts[key]

    def _part(self, box: Box, widths: tuple[tuple[int, int], ...]) -> Part:
        rims, seen, own = self.exchange.rims, [], []
        of_axes = zip(box, rims.inner, rims.shape, widths, strict=True)
        for (start, stop), (first, _), size, (before, after) in of_axes:
            low = max(0, first + start - before)
            seen.append((low, min(size, first + stop + after)))
            own.append((first + start - low, first + stop - low))
        data = self.data[box_slices(tuple(seen))]
        return Part(data, box_slices(tuple(own)), box_slices(box))


class Exchange:
    """Fills the rims of shares, again and again."""

    def __init__(
        self,
        call: RimCall,  # what all members exchange
        device: Host = HOST,  # where shares lie: of a `Gpu` nothing waits for its stream
    ) -> None:
        self.rims, self.dtype, self.device = call.rims, call.dtype, device
        self._moved = device.moved_rims(call)
        self._copies = [(box_slices(src), box_slices(dst)) for src, dst in self.rims.copies]
        # NumPy takes no number for an item that is nothing but bytes.
        is_bytes = call.dtype.kind == "V" and call.dtype.names is None
        nothing = np.zeros((), call.dtype) if is_bytes else None
        self._fills = [
            (box_slices(fill.dst), fill.value if nothing is None else nothing)
            for fill in self.rims.fills
        ]
        self._pending: Pending | None = None

    @cached_property
    def whole(self) -> Box:
        """The share, as a box of it."""
        return tuple((0, stop - start) for start, stop in self.rims.inner)

    @cached_property
    def boxes(self) -> list[Box]:
        """Of the share: what needs no rims of other members, then what does."""
        return interior_and_frames(self.rims)

    @cached_property
    def is_worth_hiding(self) -> bool:
        """Whether the inside of shares should be computed while rims are on their way."""
        return self._moved.is_worth_hiding(box_size(self.rims.inner))

    def begin(
        self,
        data: Array,  # the share with its rims
        beside: bool = True,  # whether the caller has something else to do: see `RimMessages`
    ) -> Pending:
        """Begin to fill the rims of this member's share, from those of all members."""
        if self._pending is not None:
            raise InputError(
                "expected wait() of the exchange that halo_begin() began, before these rims are "
                "exchanged again. Give other fields memory of their own: ctx.padded."
            )
        self._fill(data)  # before rims are packed for others, which include these
        end = self._moved.begin(data, beside)
        self._pending = Pending(self, data, end)
        return self._pending

    def can_put(self) -> bool:
        """Return whether `put` can be used, after the first exchange; make ready for it."""
        return isinstance(self._moved, RimWindows) and self._moved.can_put()

    def put(self, data: Array) -> None:
        """Put all that fills the rims on the GPU's stream: see `RimWindows.put`."""
        assert isinstance(self._moved, RimWindows)
        self._fill(data)
        self._moved.put(data)

    def _fill(self, data: Array) -> None:
        """Fill the rims that need no other member."""
        for src, dst in self._copies:
            data[dst] = data[src]
        for dst, value in self._fills:
            data[dst] = value

    def end(self) -> None:
        """Take note that the rims are filled."""
        self._pending = None


class Pending:
    """Rims that are on their way."""

    def __init__(
        self,
        exchange: Exchange,  # what fills the rims
        data: Array,  # of which share
        end: Callable[[], Any] | None,  # waits until they are in their places
    ) -> None:
        self._exchange: Exchange | None = exchange
        self._data, self._end = data, end

    def wait(self) -> Array:
        """Wait until the rims are filled; return the share with its rims.

        Raises
        ------
        SectionError
            If the members made different calls, or rims differ between them.
        """
        if self._exchange is not None:
            if self._end is not None:
                self._end()
            self._exchange.end()
            self._exchange = None
        return self._data
