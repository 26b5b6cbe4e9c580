"""Local blocks with a halo, and the exchange that fills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import finalize, ref

import numpy as np

from dask_p2p.backends.base import unread_value
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_size, box_slices
from dask_p2p.plans.halo import RankHalo, split_interior
from dask_p2p.sections.exchange.boundaries import Ends
from dask_p2p.sections.exchange.device import HOST, Host, WideHalos
from dask_p2p.sections.exchange.regions import ExchangeCall, HaloMover
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DType

_MOST_COMPARED_BYTES = 1 << 22  # of a local block and its copy


class HaloPart(NamedTuple):
    """A part of a local block, and the elements that a stencil reads for it.

    Attributes
    ----------
    data : numpy.ndarray or cupy.ndarray
        The part with its halo. It is read-only, as NumPy enforces.
    inner : tuple of slice
        Slices of the part in `data`.
    where : tuple of slice
        Slices of the part in the local block.
    """

    data: Array
    inner: Any
    where: Any


class HaloArray:
    """A rank's local block with a halo around it.

    Attributes
    ----------
    data : numpy.ndarray or cupy.ndarray
        The local block with its halo.
    inner : numpy.ndarray or cupy.ndarray
        The local block: a view of `data`.

    See Also
    --------
    dask_p2p.results.Context.with_halo : Make one.
    dask_p2p.results.Context.update_halo : Fill its halo.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import spmd
    >>> def smooth(ctx, u):
    ...     p = ctx.with_halo(u, depth=1, boundary="nearest")
    ...     ctx.update_halo(p, copy=False)
    ...     return (p.data[:-2] + p.data[2:]) / 2
    >>> y = spmd(smooth, da.arange(4.0, chunks=2))
    >>> y.compute(scheduler="sync")
    array([0.5, 1. , 2. , 2.5])
    """

    def __init__(
        self,
        layout: HaloLayout,  # shared by arrays that are exchanged in turn
        data: Array | None = None,  # memory for all elements; None: zeros
    ) -> None:
        self.layout = layout
        zeros, shape = layout.device.zeros, layout.halo.shape
        self.data: Array = zeros(shape, layout.dtype) if data is None else data
        self.inner: Array = self.data[box_slices(layout.halo.inner)]
        self.fill_unread(unread_value(layout.dtype))
        self._parts: dict[Any, HaloPart] = {}  # each step needs the same ones
        self.first_copy: FirstCopy | None = None  # returned by `Context.update_halo`

    def fill_ends(self) -> None:
        """Let functions fill the parts beyond the ends of the array, after an exchange."""
        if self.layout.ends is not None:
            self.layout.ends.fill(self.data)

    def fill_unread(self, value: Any) -> None:
        for box in self.layout.halo.unread:
            self.data[box_slices(box)] = value

    @property
    def interior(self) -> HaloPart:
        """The part that can be computed without halos of other ranks; it may be empty.

        It is a `HaloPart`. Its `data` is the part with its halo, `inner` the slices of the part in
        `data`, and `where` the slices of the part in the local block.
        """
        return self.part(self.layout.boxes[0])

    @property
    def boundary_parts(self) -> list[HaloPart]:
        """The boundary: two parts for each divided axis, or the whole local block."""
        return [self.part(box) for box in self.layout.boxes[1:]]

    def part(self, box: Box, depth: Sequence[tuple[int, int]] | None = None) -> HaloPart:
        """Return a box of the local block, with a halo that is no wider than `depth`."""
        widths = self.layout.halo.depth if depth is None else tuple(depth)
        if (box, widths) not in self._parts:
            self._parts[box, widths] = self._part(box, widths)
        return self._parts[box, widths]

    def _part(self, box: Box, widths: tuple[tuple[int, int], ...]) -> HaloPart:
        halo, seen_slices, inner_slices = self.layout.halo, [], []
        of_axes = zip(box, halo.inner, halo.shape, widths, strict=True)
        for (start, stop), (first, _), size, (before, after) in of_axes:
            low = max(0, first + start - before)
            seen_slices.append((low, min(size, first + stop + after)))
            inner_slices.append((first + start - low, first + stop - low))
        # Other parts are computed from the same elements later.
        data = self.layout.device.read_only(self.data[box_slices(tuple(seen_slices))])
        return HaloPart(data, box_slices(tuple(inner_slices)), box_slices(box))


class FirstCopy:
    """The first copy of a local block that `Context.update_halo` returned, checked once.

    A function that computes in the copy, and expects the local block to change, would go on with
    the old values.
    """

    def __init__(self, halo_array: HaloArray, copy: Array) -> None:
        self._device, self._data = halo_array.layout.device, ref(halo_array.data)
        inner = box_slices(halo_array.layout.halo.inner)
        row_bytes = halo_array.inner.nbytes // max(1, *halo_array.inner.shape[:1])
        rows = slice(max(1, _MOST_COMPARED_BYTES // max(1, row_bytes)))
        some = (rows,) * min(1, halo_array.inner.ndim)
        self._inner, self._some = inner, some
        self._copied: Any = copy[inner][some]
        self._before = self._sums()

    def check(self) -> None:
        """Refuse a function that has changed the copy, and not the local block."""
        if self._copied is not None:
            inner, copied = self._sums()
            self._copied = None
            if inner == self._before[0] and copied != self._before[1]:
                raise InputError(
                    "expected a function that writes its results to the local block, p.inner[...] "
                    "= ..., got one that writes them to the copy that ctx.update_halo(p) returned. "
                    "Write to p.inner, or use the local block itself: "
                    "ctx.update_halo(p, copy=False)."
                )

    def check_returned(self, arrays: Sequence[Any]) -> None:
        """Check the copy if the function has returned memory of the local block."""
        module = self._device.module
        results, data = (
            [array for array in arrays if isinstance(array, module.ndarray)],
            self._data(),
        )
        if data is not None and any(module.may_share_memory(array, data) for array in results):
            self.check()

    def _sums(self) -> tuple[int, int]:
        data = self._data()
        assert data is not None, "its local block is gone"
        inner = data[self._inner][self._some]
        return self._device.checksum(inner), self._device.checksum(self._copied)


class HaloCopies:
    """The copies of local blocks that a rank's function received: the first ones are checked."""

    def __init__(self) -> None:
        self._first: dict[int, FirstCopy] = {}  # of local blocks that are alive

    def copy(self, halo_array: HaloArray) -> Array:
        copied = halo_array.data.copy()
        if halo_array.first_copy is None:
            halo_array.first_copy = first = FirstCopy(halo_array, copied)
            self._first[id(first)] = first
            finalize(halo_array.data, self._first.pop, id(first), None)
        return copied

    def check_returned(self, arrays: Sequence[Any]) -> None:
        for first in [*self._first.values()]:
            first.check_returned(arrays)


class HaloLayout:
    """Shape, dtype and boundary of halo arrays; fills the parts that need no other rank."""

    def __init__(
        self,
        halo: RankHalo,
        dtype: DType,
        text: str,  # text of the exchange of one array, the same on all ranks
        order: str = "auto",  # schedule of the messages: one of `dask_p2p.plans.ranks.ORDERS`
        device: Host = HOST,  # of the arrays
        ends: Ends | None = None,  # parts that functions fill
    ) -> None:
        self.ends = ends or None
        halo = replace(halo, is_changed_later=self.ends is not None)
        self.halo, self.dtype, self.device = halo, dtype, device
        self.call = ExchangeCall(text, dtype, halo, order)
        self._copies = [(box_slices(src), box_slices(dst)) for src, dst in halo.local]
        # NumPy cannot assign a number to an item of raw bytes.
        is_bytes = dtype.kind == "V" and dtype.names is None
        nothing = np.zeros((), dtype) if is_bytes else None
        self._fills = [
            (box_slices(fill.dst), fill.value if nothing is None else nothing)
            for fill in halo.fills
        ]
        self.is_in_flight = False  # whether an exchange of such an array has begun
        #: Exchanges of arrays, the first with this layout, by whether ranks read them in place, and
        #: the texts of the others' calls.
        self.exchanges: dict[tuple[bool, tuple[str, ...]], HaloExchange] = {}

    @cached_property
    def local_box(self) -> Box:
        return tuple((0, stop - start) for start, stop in self.halo.inner)

    @cached_property
    def boxes(self) -> list[Box]:
        """Boxes of the local block: the interior, then those that need halos of other ranks."""
        return split_interior([self.halo])

    def fill(self, data: Array) -> None:
        """Fill the part of the halo that needs no other rank."""
        for src, dst in self._copies:
            self.device.assign(data[dst], data[src])
        for dst, value in self._fills:
            data[dst] = value


class HaloExchange:
    """Fills the halos of one or several local blocks, repeatedly: one message a neighbour."""

    def __init__(
        self,
        layouts: Sequence[HaloLayout],  # of the halo arrays
        connections: Connections,  # connections to other ranks
        # Whether ranks read wide halos in each other's host memory; None: halos are packed.
        reads_memory: bool | None = None,
    ) -> None:
        # Layouts have references to exchanges. One in return would delay the end of both.
        calls, halos = [layout.call for layout in layouts], [layout.halo for layout in layouts]
        self.mover: HaloMover = (
            layouts[0].device.halo_mover(calls, connections)
            if reads_memory is None
            else WideHalos(calls, connections, reads_memory)
        )
        self._elements = box_size(halos[0].inner)
        self.boxes = split_interior(halos)

    @classmethod
    def for_arrays(
        cls, halo_arrays: Sequence[HaloArray], connections: Connections, reads_memory: bool | None
    ) -> HaloExchange:
        """Return the exchange that fills the halos of some arrays; later calls return the same.

        Raises `InputError` for anything but halo arrays, each of them once.
        """
        _check_halo_arrays(halo_arrays)
        first, *companions = halo_arrays
        names: tuple[str, ...] = ()
        if companions:
            names = tuple(halo_array.layout.call.text for halo_array in companions)
        key = reads_memory is not None, names
        exchange = first.layout.exchanges.get(key)
        if exchange is None:
            layouts = [halo_array.layout for halo_array in halo_arrays]
            exchange = first.layout.exchanges[key] = cls(layouts, connections, reads_memory)
        return exchange

    @cached_property
    def has_parts(self) -> bool:
        """True if a part of the boundary needs halos of other ranks."""
        return any(map(box_size, self.boxes[1:]))

    @cached_property
    def is_worth_hiding(self) -> bool:
        """True if the interior should be computed while the halos are in flight."""
        return self.mover.is_worth_hiding(self._elements, in_graph=False)

    @cached_property
    def is_worth_hiding_in_graph(self) -> bool:
        return self.mover.is_worth_hiding(self._elements, in_graph=True)

    def begin(
        self,
        halo_arrays: Sequence[HaloArray],
        in_background: bool = True,  # as for `HaloMover.begin`
        # Returns results of `wait`; None: `data`.
        make_result: Callable[[HaloArray], Array] | None = None,
    ) -> Pending:
        arrays = []
        for halo_array in halo_arrays:
            if halo_array.layout.is_in_flight:
                raise InputError(
                    "expected wait() of the exchange that update_halo_begin() began, before the "
                    "same halo is exchanged again. Give other fields memory of their own: "
                    "ctx.with_halo."
                )
            halo_array.layout.is_in_flight = True
            # Before halos for others are packed: they include this.
            halo_array.layout.fill(halo_array.data)
            arrays.append(halo_array.data)
        end = self.mover.begin(arrays, in_background)
        return Pending(halo_arrays, end, make_result)

    def enqueue(
        self, halo_arrays: Sequence[HaloArray], meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Enqueue the whole exchange on the GPU's stream: see `HaloWindows.enqueue`.

        `meanwhile` enqueues work that needs no halos of other ranks. The GPU does it concurrently.
        """
        for halo_array in halo_arrays:
            halo_array.layout.fill(halo_array.data)
        arrays = [halo_array.data for halo_array in halo_arrays]
        if meanwhile is None:
            self.mover.enqueue(arrays)
        else:
            device: Any = halo_arrays[0].layout.device
            with device.on_side_stream():
                self.mover.enqueue(arrays)
            meanwhile()
            device.join()
        for halo_array in halo_arrays:
            halo_array.fill_ends()


def _check_halo_arrays(halo_arrays: Sequence[Any]) -> None:
    if not halo_arrays:
        raise InputError("expected at least one halo array, from ctx.with_halo(), got none.")
    for halo_array in halo_arrays:
        if not isinstance(halo_array, HaloArray):
            raise InputError(
                f"expected memory from ctx.with_halo(), got {type(halo_array).__name__}. Make it "
                f"once, p = ctx.with_halo(local, depth), and change the local block in p.inner."
            )
    if len(halo_arrays) > 1 and len({halo_array.layout for halo_array in halo_arrays}) < len(
        halo_arrays
    ):
        raise InputError(
            "expected different halo arrays in one call, got one twice. Give each of them once."
        )


class Pending:
    """A halo exchange in flight."""

    def __init__(
        self,
        halo_arrays: Sequence[HaloArray],
        end: Callable[[], Any] | None,  # waits until the halos are in place
        make_result: Callable[[HaloArray], Array] | None,  # returns results of `wait`; None: `data`
    ) -> None:
        self._halo_arrays, self._end, self._make_result = halo_arrays, end, make_result
        self._results: list[Array] | None = None

    def wait(self) -> Any:
        """Wait until the halos are filled; return the local blocks with their halos.

        Returns
        -------
        numpy.ndarray or cupy.ndarray, or tuple of them
            The local block with its halo; a tuple if the exchange has several.

        Raises
        ------
        SectionError
            If the ranks made different calls, or their halos differ.
        """
        if self._results is None:
            if self._end is not None:
                self._end()
            make_result, results = self._make_result, []
            for halo_array in self._halo_arrays:
                halo_array.layout.is_in_flight = False
                halo_array.fill_ends()
                results.append(halo_array.data if make_result is None else make_result(halo_array))
            self._results = results
        return self._results[0] if len(self._results) == 1 else tuple(self._results)
