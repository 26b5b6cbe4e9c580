"""What the function of a gang gets beside its arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import Box
from dask_p2p.ops.rims import checked_boundaries, checked_depths
from dask_p2p.plans.members import Members
from dask_p2p.plans.rims import rims
from dask_p2p.sections.collectives import Collectives
from dask_p2p.sections.devices import HOST, Host, check_kind
from dask_p2p.sections.halo import Exchange, Padded, Pending
from dask_p2p.sections.links import Links
from dask_p2p.sections.progress import Progress
from dask_p2p.sections.recut import Redistribution
from dask_p2p.sections.rim_messages import RimCall
from dask_p2p.sections.saved import Checkpoints, Period
from dask_p2p.sections.staged import checked_order
from dask_p2p.sections.state_memory import check_state
from dask_p2p.sections.transforms import Transforms
from dask_p2p.types import Array, BoundaryLike, DepthLike, DTypeLike


class Context(Collectives, Transforms):
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
        super().__init__(rank, members.size, links, device)
        self.grid = members.grid
        self.box: Box = members.box(rank)
        self._members, self._checkpoints = members, checkpoints
        self.progress = Progress()
        self._saved_step = -1  # of the last checkpoint
        self._has_steps = False  # whether there was a loop of `steps`
        self._redistribution = Redistribution(members, rank, links, reads_memory, device)

    def padded(
        self,
        share: Array | None = None,
        depth: DepthLike = 1,
        boundary: BoundaryLike = "none",
        corners: bool = False,
        dtype: DTypeLike | None = None,
        exchange: str = "auto",
    ) -> Padded:
        """Return memory for this member's share with rims around it.

        Parameters
        ----------
        share : array, optional
            What is copied into it. By default it has zeros.
        depth, boundary
            Width of the rims, and what lies beyond the ends of the array: as
            `dask_p2p.map_overlap` takes them.
        corners : bool
            Whether rims include what lies across corners. Stencils that are shaped like a star do
            not read that: without, it is zero, and does not move.
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
            If depth, boundary or exchange is nothing of the kind, `share` has another shape, or
            there are Python objects in it.
        """
        whole = [tuple(map(sum, self._members.chunks))]
        kind = np.dtype(dtype if dtype is not None else getattr(share, "dtype", np.float64))
        if kind.hasobject:
            raise InputError(f"dtype: expected one without Python objects, got {kind}.")
        (widths,) = checked_depths(depth, whole)
        (beyond,) = checked_boundaries(boundary, whole, kind)
        call = f"halo() of {kind.str}, depth {widths}, boundary {beyond}, corners {bool(corners)}"
        own = rims(self._members, self.rank, widths, beyond, bool(corners))
        rim_call = RimCall(own, kind, call, self._links, checked_order(exchange))
        padded = Padded(Exchange(rim_call, self.device))
        if share is not None:
            if np.shape(share) != padded.inner.shape:
                raise InputError(
                    f"share: expected an array of shape {padded.inner.shape}, got one of shape "
                    f"{np.shape(share)}."
                )
            check_kind(self.device, "share", share := self.device.as_array(share))
            padded.inner[...] = share
        return padded

    def halo(self, padded: Padded) -> Array:
        """Fill the rims, from the shares of all members; return the share with its rims.

        On a GPU all that is put on the member's stream, and nothing is waited for.

        Raises
        ------
        InputError
            If `padded` did not return it.
        SectionError
            If the members made different calls, or rims differ between them.
        """
        return _exchange_of(padded).begin(padded.data, beside=False).wait()

    def halo_begin(self, padded: Padded) -> Pending:
        """Begin to fill the rims; ``wait()`` of what is returned ends that, as `halo` does.

        The function may compute ``padded.interior`` meanwhile, and then ``padded.frames``. The next
        call that exchanges anything waits for rims that are on their way.

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

    def steps(
        self, count: int, save: Sequence[Array] = (), every: int | str | None = "30 s"
    ) -> Iterator[int]:
        """Count steps, and keep the state of the function now and then.

        When the members run again, since a worker was lost, the steps go on where all states were
        kept last. A function may have one such loop.

        Parameters
        ----------
        count : int
            How many steps there are.
        save : sequence of array
            All that a step needs of the steps before it. The arrays are filled with the state that
            was kept before the first step, and must be the same ones in all steps.
        every : int, str or None
            After how many steps, or how much time, a state is kept: on the member's own worker,
            and on another one. None for never.

        Yields
        ------
        int
            The number of the step, from 0; or from where the members go on.

        Raises
        ------
        InputError
            If `count` is no number of steps, `every` nothing of the kind, or `save` no sequence
            of arrays that can be written; or if it is the second loop.
        SectionError
            If the members made different calls.
        """
        try:
            count, save = index(count), tuple(save)
        except TypeError:
            raise InputError(
                f"expected a number of steps, and a list of arrays, got {count=}, {save=}. Give an "
                f"integer and a list: ctx.steps(100, save=[u])."
            ) from None
        if self._has_steps:
            raise InputError(
                "expected one loop of ctx.steps, got a second one: members that go on would take "
                "the state of one for that of the other. Count steps of both in one loop."
            )
        self._has_steps = True
        period, self.progress.steps = Period(every), count
        for step in range(self.restore(*save), count):
            yield step
            self.progress.step = step + 1
            self.device.keep_up(step + 1)
            if step + 1 < count and self.is_due(period, step + 1):
                self.checkpoint(step + 1, *save)

    def is_due(self, period: Period, step: int) -> bool:
        """Return whether a checkpoint is due after so many steps: the same on all members."""
        if self._checkpoints is None:
            return False
        return period.is_due(step, lambda values: self.allreduce(values, "max"))

    def checkpoint(self, step: int, *arrays: Array) -> None:
        """Keep copies of arrays: what is needed to go on after so many steps.

        Parameters
        ----------
        step : int
            How many steps there have been: more than at the last checkpoint.
        *arrays
            As many on all members. Copies are kept on this worker and on another one.

        Raises
        ------
        InputError
            If `step` is no such number, or an array cannot be written.
        SectionError
            If the members made different calls.
        """
        try:
            number = index(step)
        except TypeError:
            number = -1
        if number <= self._saved_step:
            more = f", more than {self._saved_step} at the last checkpoint"
            raise InputError(
                f"step: expected how many steps there have been"
                f"{more if self._saved_step >= 0 else ''}, got {step!r}."
            )
        check_state(arrays, self.device)
        if self._checkpoints is not None:
            self._checkpoints.save(number, arrays)
        self._saved_step = number

    def restore(self, *arrays: Array) -> int:
        """Fill arrays with what was kept by the last checkpoint of all members, if there is one.

        Returns
        -------
        int
            After how many steps that was; 0 if there is none, and for a second call.

        Raises
        ------
        InputError
            If one is no array that can be written.
        SectionError
            If the members made different calls.
        """
        check_state(arrays, self.device)
        step = 0 if self._checkpoints is None else self._checkpoints.restore(arrays)
        self.progress.step = self.progress.first = step
        self._saved_step = max(self._saved_step, step or -1)
        return step


def _exchange_of(padded: Any) -> Exchange:
    if not isinstance(padded, Padded):
        raise InputError(
            f"expected what ctx.padded() returned, got {type(padded).__name__}. Make it once, "
            f"p = ctx.padded(share, depth), and change the share in p.inner."
        )
    return padded.exchange
