"""What the function of a gang gets beside its arrays."""

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
    """One member's place among the members that run a function at the same time.

    With CuPy blocks a stream of the member's own is the current one while the function runs, and
    methods put their work on that stream, too. The function need wait for nothing.

    All members must call the same methods in the same order. Where they do not, all raise a
    `SectionError` that names both calls.

    Attributes
    ----------
    rank, size : int
        Which member this is, of how many.
    grid : tuple of int
        How many members there are along each axis.
    box : tuple of tuple of int
        Where in the whole array this member's share is: (start, stop) of each axis.
    """

    def __init__(
        self,
        members: Members,  # which member has what of the array
        rank: int = 0,  # which member this is
        links: Links | None = None,  # by which it exchanges; None if it is the only one
        checkpoints: Checkpoints | None = None,  # what keeps its states
        reads_memory: bool = True,  # whether members of one host may read each other's memory
        device: Host = HOST,  # where its shares lie
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
        """Return memory for this member's share with rims around it.

        Parameters
        ----------
        share : array, optional
            The values to copy into it, of NumPy or CuPy as the section's arrays. Without an array
            all elements are zero.
        depth, boundary
            Width of the rims, and what lies beyond the ends of the array: as
            `dask_p2p.map_overlap` takes them.
        corners : bool
            Whether rims include the elements across corners. A stencil that reads neighbours along
            one axis at a time does not need corners. With False they are not exchanged. They are
            NaN where the dtype has NaN.
        dtype : dtype, optional
            By default that of `share`, or float64.
        exchange : {"auto", "diagonal", "left-right", "pairwise"}
            In which order `halo` exchanges messages: see `redistribute`.

        Returns
        -------
        Padded
            ``data`` is the whole, ``inner`` the share in it. `halo` fills the rims.

        Raises
        ------
        InputError
            If depth, boundary or exchange is nothing of the kind, `share` has another shape or a
            dtype that `dtype` cannot hold, or there are Python objects in it.
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
        """Fill the rims, from the shares of all members; return the share with its rims.

        On a GPU all that is put on the member's stream, and nothing is waited for.

        Parameters
        ----------
        padded : Padded
            Memory that `padded` returned.
        copy : bool, optional
            Whether to return a copy, which stays as it is when `padded` is filled again. False
            returns `padded.data` itself, and saves the time of the copy.

        Raises
        ------
        InputError
            If `padded` did not return it, or the function wrote its results to the last copy and
            left the share as it was.
        SectionError
            If the members made different calls, or rims differ between them.
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
        """Check the copies of shares when the function has returned: see `FirstCopy`."""
        for first in self._first_copies:
            first.check_returned(arrays)

    def halo_begin(self, padded: Padded) -> Pending:
        """Begin to fill the rims; ``wait()`` of the result ends that, and returns `padded.data`.

        The function may compute ``padded.interior`` at once, ``padded.frames`` after ``wait()``.
        The next call that exchanges anything waits for rims that are on their way. Other members
        receive the share as it is at this call, whatever the function writes into it afterwards.

        Raises
        ------
        InputError
            If rims of this memory are on their way already, or `padded` did not return it.
        SectionError
            If the members made different calls, or rims differ between them.
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
        """Divide an array between the members along other axes; return what this one has then.

        All members give each other what they then have: a transpose of slabs, if `cut` is another
        axis. What is kept for messages is used again by the next call. On a GPU all that is put on
        the member's stream, and parts are read from other GPUs of the host. Those of others come
        through host memory, for which the call waits.

        Parameters
        ----------
        a : array
            What this member has of the array, of any dtype without Python objects. It is not
            changed.
        cut : sequence of int, optional
            Axes that may be divided afterwards, as `dask_p2p.spmd` takes them. By default those
            of the section's arrays. An array of their shape is divided in the same places where
            as many members come along an axis; otherwise evenly. What a member has may be empty.
        from_cut : sequence of int, optional
            The same of `a`, as it is.
        axes : sequence of int, optional
            A permutation: axis ``i`` afterwards is axis ``axes[i]`` of `a`, and `cut` are axes
            afterwards. By default axes stay.
        shape : sequence of int, optional
            Of the whole array that is `a` at all members. By default that of the section's arrays,
            before the axes are permuted; or after it if `from_cut` is given, and no `cut`.
        out : array, optional
            Memory for the result: a loop that gives it allocates nothing. Not that of `a`.
        exchange : {"auto", "diagonal", "left-right", "pairwise"}
            In which order. "auto": with all members at the same time. In the others each has one
            partner at a time: those after it, in turn; the neighbours at the right and at the left,
            then those behind them; or another one for both ways.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            The caller's own: `out` if that is given.

        Raises
        ------
        AxesError
            If the array has no such axes.
        InputError
            If `a` or `out` has another shape, or cannot be exchanged, or there is no such order.
        SectionError
            If the members made different calls.
        """
        recut = self._redistribution.recut(cut, from_cut, axes, shape)
        return recut(a, out, checked_order(exchange))

    def box_of(self, cut: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Box:
        """Return what `box` is for another cut: see `redistribute`."""
        return self._redistribution.members(cut, shape).box(self.rank)


def _exchange_of(padded: Any) -> Exchange:
    if not isinstance(padded, Padded):
        raise InputError(
            f"expected what ctx.padded() returned, got {type(padded).__name__}. Make it once, "
            f"p = ctx.padded(share, depth), and change the share in p.inner."
        )
    return padded.exchange
