"""The context that the function of a gang receives in addition to its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box
from dask_p2p.ops.rims import checked_boundaries, checked_depths
from dask_p2p.plans.members import Members
from dask_p2p.plans.rims import rims
from dask_p2p.sections.devices import HOST, Host, check_kind
from dask_p2p.sections.halo import Exchange, FirstCopy, Padded, Pending
from dask_p2p.sections.links import Links
from dask_p2p.sections.recut import Redistribution
from dask_p2p.sections.rim_messages import RimCall
from dask_p2p.sections.saved import Checkpoints
from dask_p2p.sections.staged import checked_order
from dask_p2p.sections.stepping import Stepping
from dask_p2p.sections.transforms import Transforms
from dask_p2p.types import Array, BoundaryLike, DepthLike, DTypeLike


class Context(Stepping, Transforms):
    """One rank among the ranks that run a function at the same time.

    With CuPy blocks, the rank's own stream is the current one while the function runs. Methods
    enqueue their work on that stream, too, so the function need not wait for the GPU.

    All ranks must call the same methods in the same order. Otherwise all raise a `SectionError`
    that names both calls.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    grid : tuple of int
        Number of ranks along each axis.
    box : tuple of tuple of int
        Position of the local block in the whole array: (start, stop) of each axis.
    """

    def __init__(
        self,
        members: Members,  # decomposition of the array
        rank: int = 0,  # this rank
        links: Links | None = None,  # connections to the other ranks; None for a single rank
        checkpoints: Checkpoints | None = None,  # stores its states
        reads_memory: bool = True,  # whether ranks of one host may read each other's memory
        device: Host = HOST,  # of its local blocks
    ) -> None:
        super().__init__(rank, members.size, links, device, checkpoints)
        self.grid = members.grid
        self.box: Box = members.box(rank)
        self._members = members
        self._padded = 0  # calls of `padded` so far
        self._first_copies: list[FirstCopy] = []
        self._redistribution = Redistribution(members, rank, links, reads_memory, device)

    def padded(
        self,
        share: Array | None = None,
        depth: DepthLike = 1,
        boundary: BoundaryLike = "none",
        corners: bool = True,
        dtype: DTypeLike | None = None,
        exchange: str = "auto",
    ) -> Padded:
        """Return memory for this rank's local block with a halo around it.

        Parameters
        ----------
        share : array, optional
            The values to copy into it: a NumPy or CuPy array, like the section's arrays. Without an
            array all elements are zero.
        depth, boundary
            Width of the halo, and values beyond the ends of the array, as for
            `dask_p2p.map_overlap`.
        corners : bool
            If True, the halo includes corners. A stencil that reads neighbours along one axis at a
            time does not need corners. With False they are not exchanged, and are NaN if the dtype
            has NaN.
        dtype : dtype, optional
            By default that of `share`, or float64.
        exchange : {"auto", "diagonal", "left-right", "pairwise"}
            Order of messages in `halo`: see `redistribute`.

        Returns
        -------
        Padded
            ``data`` is the whole array, ``inner`` the local block in it. Call `halo` to fill the
            rest.

        Raises
        ------
        InputError
            If `depth`, `boundary` or `exchange` is invalid, `share` has another shape or a dtype
            that cannot become `dtype`, or the dtype holds Python objects.
        """
        whole = [tuple(map(sum, self._members.chunks))]
        share = None if share is None else self.device.as_array(share)
        own = np.dtype(getattr(share, "dtype", np.float64))
        kind = own if dtype is None else np.dtype(dtype)
        if kind.hasobject:
            raise InputError(f"dtype: expected one without Python objects, got {kind}.")
        (widths,) = checked_depths(depth, whole)
        (beyond,) = checked_boundaries(boundary, whole, kind)
        around = rims(self._members, self.rank, widths, beyond, bool(corners))
        call = (
            f"halo() of padded {self._padded}, {kind.str}, depth {widths}, boundary {beyond}, "
            f"corners {bool(corners)}"
        )
        self._padded += 1
        rim_call = RimCall(around, kind, call, self._links, checked_order(exchange))
        padded = Padded(Exchange(rim_call, self.device))
        if share is not None:
            if not np.can_cast(own, kind, "same_kind"):
                raise InputError(
                    f"share: expected an array that becomes {kind}, got {own}. Convert it first, "
                    f"share.astype(...), or leave out dtype=."
                )
            if np.shape(share) != padded.inner.shape:
                raise InputError(
                    f"share: expected an array of shape {padded.inner.shape}, got one of shape "
                    f"{np.shape(share)}."
                )
            check_kind(self.device, "share", share)
            padded.inner[...] = share
        return padded

    def halo(self, padded: Padded, copy: bool = True) -> Array:
        """Fill the halo from the local blocks of all ranks; return the local block with its halo.

        On a GPU the exchange is enqueued on the rank's stream. The call waits for the GPU only if
        parts of the halo are sent as messages.

        Parameters
        ----------
        padded : Padded
            Memory that `padded` returned.
        copy : bool, optional
            If True, return a copy, which does not change when `padded` is filled again. False
            returns `padded.data` itself, and saves the time of the copy.

        Raises
        ------
        InputError
            If the argument is not from `padded`, or the function wrote its results into the copy
            and left the local block unchanged.
        SectionError
            If the ranks made different calls, or their halos differ.
        """
        exchange = _exchange_of(padded)
        if padded.first_copy is not None:
            padded.first_copy.check()
        data = exchange.begin(padded.data, beside=False).wait()
        if not copy:
            return data
        copied = data.copy()
        if padded.first_copy is None:
            padded.first_copy = FirstCopy(padded, copied)
            self._first_copies.append(padded.first_copy)
        return copied

    def check_returned(self, arrays: Sequence[Any]) -> None:
        """Check the copies of local blocks after the function has returned: see `FirstCopy`."""
        for first in self._first_copies:
            first.check_returned(arrays)

    def halo_begin(self, padded: Padded) -> Pending:
        """Begin to fill the halo; ``wait()`` of the result completes it and returns `padded.data`.

        The function may compute ``padded.interior`` immediately, and ``padded.frames`` after
        ``wait()``. The next call that exchanges anything waits for halos in flight. Other ranks
        receive the local block as it is at this call, even if the function writes into it later.

        Raises
        ------
        InputError
            If this halo is in flight already, or the argument is not from `padded`.
        SectionError
            If the ranks made different calls, or their halos differ.
        """
        return _exchange_of(padded).begin(padded.data)

    def redistribute(
        self,
        a: Array,
        cut: Sequence[int] | None = None,
        from_cut: Sequence[int] | None = None,
        *,
        axes: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        out: Array | None = None,
        exchange: str = "auto",
    ) -> Array:
        """Divide an array between the ranks along other axes; return this rank's new local block.

        This is an all-to-all exchange: a transpose of slabs, if `cut` is another axis. Later calls
        reuse the memory of messages. On a GPU the exchange is enqueued on the rank's stream, and
        regions are read from other GPUs of the host. The call waits for regions that come as
        messages.

        Parameters
        ----------
        a : array
            This rank's local block of the array, of any dtype without Python objects. It is not
            changed.
        cut : sequence of int, optional
            Axes that may be divided in the result, as for `dask_p2p.spmd`. By default those of the
            section's arrays. If an array has the section's shape, and an axis the same number of
            ranks, that axis is divided at the same positions; otherwise evenly. A local block may
            be empty.
        from_cut : sequence of int, optional
            Axes that may be divided in `a`, with the same default.
        axes : sequence of int, optional
            A permutation: axis ``i`` of the result is axis ``axes[i]`` of `a`, and `cut` names axes
            of the result. By default the order stays.
        shape : sequence of int, optional
            Shape of the whole array before the permutation. By default that of the section's
            arrays. With `from_cut` and without `cut`, the default is the shape that the permutation
            turns into theirs.
        out : array, optional
            Memory for the result, which must not be that of `a`. A loop that passes `out` allocates
            nothing.
        exchange : {"auto", "diagonal", "left-right", "pairwise"}
            Order of the messages. "auto" exchanges with all ranks at the same time. In the other
            orders each rank has one partner at a time. "diagonal" sends to the ranks after it, in
            turn. "left-right" sends to the right and the left neighbour, then to those behind them.
            "pairwise" sends to and receives from the same rank.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            The new local block, owned by the caller: `out` if that is given.

        Raises
        ------
        AxesError
            If the array has no such axes.
        InputError
            If `a` or `out` has another shape or cannot be exchanged, or there is no such order.
        SectionError
            If the ranks made different calls.
        """
        recut = self._redistribution.recut(cut, from_cut, axes, shape)
        return recut(a, out, checked_order(exchange))

    def box_of(self, cut: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Box:
        """Return the `box` of this rank for another partition: see `redistribute`."""
        return self._redistribution.members(cut, shape).box(self.rank)


def _exchange_of(padded: Any) -> Exchange:
    if not isinstance(padded, Padded):
        raise InputError(
            f"expected memory from ctx.padded(), got {type(padded).__name__}. Make it once, "
            f"p = ctx.padded(share, depth), and change the local block in p.inner."
        )
    return padded.exchange
