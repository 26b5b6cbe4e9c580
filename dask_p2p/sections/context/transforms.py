"""Redistribution and Fourier transforms of distributed arrays, called from within a section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends import memory_order
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, block_bounds, split_evenly
from dask_p2p.ops.fft.local import INVERSE, TO_COMPLEX, TO_REAL, LocalTransform, complex_dtype
from dask_p2p.ops.fft.stages import (
    Axes,
    Norm,
    check_norm,
    checked_numbered_axes,
    order_in_memory,
    plan_local_transforms,
    plan_transform,
)
from dask_p2p.plans.ranks import RankGrid, plan_transform_stages
from dask_p2p.sections.exchange.device import Host, check_kind
from dask_p2p.sections.exchange.redistribution import (
    MOST_PIECES,
    Partitions,
    Pieces,
    Redistribution,
)
from dask_p2p.sections.exchange.regions import checked_order
from dask_p2p.types import Array, DType

_Partition = Sequence[int] | None


class Transforms:
    """The exchanges of a context between all ranks: redistribution, and Fourier transforms.

    A transform consists of local transforms along whole axes, and of redistributions.
    """

    rank: int
    device: Host
    _partitions: Partitions

    def redistribute(
        self,
        a: Array,
        partition: _Partition = None,
        from_partition: _Partition = None,
        *,
        axes: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        out: Array | None = None,
        exchange: str = "auto",
    ) -> Array:
        """Divide an array between the ranks along other axes; return this rank's new local block.

        This is an all-to-all exchange: a transpose of slabs, if `partition` is another axis. Later
        calls reuse the memory of messages. On a GPU the exchange is enqueued on the rank's stream,
        and regions are read from other GPUs of the host. The call waits for regions that come as
        messages.

        Parameters
        ----------
        a : array
            This rank's local block of the array, of any dtype without Python objects. It is not
            changed.
        partition : sequence of int, optional
            Axes that may be divided in the result, as for `dask_p2p.spmd`. By default those of the
            section's arrays. If an array has the section's shape, and an axis the same number of
            ranks, that axis is divided at the same positions; otherwise evenly. A local block may
            be empty.
        from_partition : sequence of int, optional
            Axes that may be divided in `a`, with the same default.
        axes : sequence of int, optional
            A permutation: axis ``i`` of the result is axis ``axes[i]`` of `a`, and `partition`
            names axes of the result. By default the axes keep their order.
        shape : sequence of int, optional
            Shape of the whole array before the permutation. By default that of the section's
            arrays. With `from_partition` and without `partition`, the result has that shape by
            default.
        out : array, optional
            Memory for the result, which must not be that of `a`. A loop that passes `out` allocates
            nothing.
        exchange : {"auto", "diagonal", "left-right", "pairwise"}, optional
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
        InputError
            If the array has no such axes.
            Also if `a` or `out` has another shape or cannot be exchanged, or `exchange` is unknown.
        SectionError
            If the ranks made different calls.
        """
        redistribution = self._partitions.redistribution(partition, from_partition, axes, shape)
        return redistribution(a, out, checked_order(exchange))

    def box_of(self, partition: _Partition = None, shape: Sequence[int] | None = None) -> Box:
        """Return the `box` of this rank for another partition: see `redistribute`."""
        return self._partitions.ranks(partition, shape).box(self.rank)

    def fftn(
        self,
        a: Array,
        axes: Axes = None,
        *,
        partition: _Partition = None,
        from_partition: _Partition = None,
        shape: Sequence[int] | None = None,
        norm: Norm = None,
    ) -> Array:
        """Transform a distributed array, as `numpy.fft.fftn` does.

        The result has the partition of the section's arrays by default, which takes two exchanges
        for slabs. One is enough if the result may be divided along another axis: ``partition=(1,)``
        for slabs along axis 0, and ``from_partition=(1,)`` for the way back.

        Parameters
        ----------
        a : array
            This rank's local block. It is not changed.
        axes : sequence of int, optional
            Axes to transform, without repetition. By default all.
        partition, from_partition : sequence of int, optional
            Axes that may be divided in the result, and in `a`: as for `redistribute`.
        shape : sequence of int, optional
            Shape of the whole array in space: the input of `fftn` and `rfftn`, the result of
            `ifftn` and `irfftn`. By default the shape of the section's arrays.
        norm : {"backward", "ortho", "forward"}, optional
            Direction that is scaled, as in NumPy: by default the inverse transform.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            This rank's local block of the result: complex numbers of the precision of `a`.

        Raises
        ------
        InputError
            If the array has no such axes.
            Also if `a` has another shape, or is not numeric.
        SectionError
            If the ranks made different calls.
        """
        return self._transformed("fft", a, axes, partition, from_partition, shape, norm)

    def ifftn(
        self,
        a: Array,
        axes: Axes = None,
        *,
        partition: _Partition = None,
        from_partition: _Partition = None,
        shape: Sequence[int] | None = None,
        norm: Norm = None,
    ) -> Array:
        """Return the inverse of `fftn`, with the same parameters and errors."""
        return self._transformed("ifft", a, axes, partition, from_partition, shape, norm)

    def rfftn(
        self,
        a: Array,
        axes: Axes = None,
        *,
        partition: _Partition = None,
        from_partition: _Partition = None,
        shape: Sequence[int] | None = None,
        norm: Norm = None,
    ) -> Array:
        """Transform real numbers: length ``n`` of the last of `axes` becomes ``n // 2 + 1``.

        Parameters and errors are those of `fftn`.
        """
        return self._transformed("rfft", a, axes, partition, from_partition, shape, norm)

    def irfftn(
        self,
        a: Array,
        axes: Axes = None,
        *,
        partition: _Partition = None,
        from_partition: _Partition = None,
        shape: Sequence[int] | None = None,
        norm: Norm = None,
    ) -> Array:
        """Return the inverse of `rfftn`: real numbers.

        Parameters and errors are those of `fftn`.
        """
        return self._transformed("irfft", a, axes, partition, from_partition, shape, norm)

    def wavenumbers(
        self,
        spacing: float | Sequence[float] = 1.0,
        axes: Axes = None,
        *,
        partition: _Partition = None,
        shape: Sequence[int] | None = None,
        real: bool = False,
    ) -> tuple[Array, ...]:
        """Return the angular wavenumbers of this rank's local block of a transform.

        Parameters
        ----------
        spacing : float or sequence of float, optional
            Distance between points: one for all axes, or one for each of `axes`. By default 1.
        axes, partition, shape : optional
            The arguments of the transform.
        real : bool, optional
            True for a transform by `rfftn`.

        Returns
        -------
        tuple of numpy.ndarray or cupy.ndarray
            One array for each of `axes`. They can be broadcast to the local block.

        Raises
        ------
        InputError
            The errors of `fftn`. Also `InputError` if `spacing` does not fit the axes.
        """
        global_shape = self._partitions.shape_of(shape)
        along = _checked_axes(axes, len(global_shape))
        try:
            steps = np.broadcast_to(np.asarray(spacing, float), len(along))
        except (TypeError, ValueError):
            raise InputError(
                f"spacing: expected a number, or one for each of {len(along)} axes, got "
                f"{spacing!r}."
            ) from None
        _, divided = self._divisions(
            "rfft" if real else "fft", global_shape, along, partition, None
        )
        box = divided.box(self.rank)
        wavenumbers = []
        for number, axis in enumerate(along):
            is_half = real and axis == along[-1]
            frequencies = np.fft.rfftfreq if is_half else np.fft.fftfreq
            axis_values = (
                2 * np.pi * frequencies(global_shape[axis], steps[number])[slice(*box[axis])]
            )
            shaped = axis_values.reshape([-1 if n == axis else 1 for n in range(len(global_shape))])
            wavenumbers.append(self.device.module.asarray(shaped))
        return tuple(wavenumbers)

    def _divisions(
        self,
        kind: str,
        global_shape: tuple[int, ...],
        along: tuple[int, ...],
        partition: _Partition,
        from_partition: _Partition,
    ) -> tuple[RankGrid, RankGrid]:
        waves = list(global_shape)
        if kind in (*TO_COMPLEX, *TO_REAL):
            waves[along[-1]] = global_shape[along[-1]] // 2 + 1
        before, after = (waves, global_shape) if kind in INVERSE else (global_shape, waves)
        divide = self._partitions.ranks
        return divide(from_partition, before, "from_partition"), divide(partition, after)

    def _transformed(
        self,
        kind: str,
        a: Any,
        axes: Axes,
        partition: _Partition,
        from_partition: _Partition,
        shape: Sequence[int] | None,
        norm: Norm,
    ) -> Array:
        check_norm(norm)
        block = self.device.as_array(a)
        check_kind(self.device, "a", block)
        is_real = kind in TO_COMPLEX
        if block.dtype.kind not in "biufc" or (is_real and block.dtype.kind == "c"):
            expected = "real numbers" if is_real else "numbers"
            raise InputError(f"a: expected {expected}, got dtype {block.dtype}.")
        options = axes, partition, from_partition, shape, norm
        make = partial(self._steps, kind, block.dtype.itemsize, *options)
        steps = self._partitions.once(f"{kind} {block.dtype.itemsize} {options}", make)
        local_block, is_own = block, False
        try:
            for step in steps:
                local_block, is_own = step(local_block, is_own)
        finally:
            self._partitions.settle()
        return local_block

    def _steps(
        self,
        kind: str,
        item_bytes: int,
        axes: Axes,
        partition: _Partition,
        from_partition: _Partition,
        shape: Sequence[int] | None,
        norm: Norm,
    ) -> list[Step]:
        """Return the steps of a transform: functions of the local block, in order."""
        global_shape = self._partitions.shape_of(shape)
        along = _checked_axes(axes, len(global_shape))
        lengths = {axis: global_shape[axis] for axis in along}
        if min(lengths.values()) < 1:
            raise InputError(f"expected elements along the axes {along}, got shape {global_shape}.")
        special = along[-1] if kind in (*TO_COMPLEX, *TO_REAL) else None
        transform = plan_transform(kind, special, lengths, (item_bytes, item_bytes))
        first, last = self._divisions(kind, global_shape, along, partition, from_partition)
        all_axes, current = tuple(range(len(global_shape))), first
        steps: list[Step] = []
        path = plan_transform_stages(first, last, transform)
        on_device, transformed_axes = self.device.kind == "cupy", [stage.axes for stage in path]
        transforms = plan_local_transforms(
            kind, special, lengths, norm, transformed_axes, on_device
        )
        for stage, local in zip(path, transforms, strict=True):
            is_there = stage.before.local_sizes == current.local_sizes
            order = all_axes
            if local is not None and not is_there:
                order = order_in_memory(len(global_shape), local, on_device)
            redistribution = self._partitions.between(
                current, stage.before, all_axes, f"{kind}n()", order
            )
            if steps and isinstance(last_made := steps[-1], AxesTransform) and not is_there:
                steps[-1] = last_made.in_pieces  # the exchange moves the pieces one by one
            steps.append(partial(exchanged, redistribution, is_there))
            if local is not None:
                local = replace(local, order=None if is_there else order)
                to_real = special in stage.axes and kind in TO_REAL
                steps.append(
                    AxesTransform(local, stage.after.shape(self.rank), to_real, self.device)
                )
            current = stage.after
        return steps


def _checked_axes(axes: Axes, ndim: int) -> tuple[int, ...]:
    return checked_numbered_axes(range(ndim) if axes is None else axes, ndim)


# The steps of a transform on a local block: exchanges, and transforms along whole axes.
#
# A step gets a local block, and whether it is a temporary, which the step may overwrite. It
# returns both for the next step.

Step: TypeAlias = Callable[[Any, bool], tuple[Any, bool]]


def exchanged(
    redistribution: Redistribution, is_there: bool, local_block: Any, is_own: bool
) -> tuple[Array, bool]:
    """Return a local block of the next partition; with `is_there` it already has this one."""
    if is_there:
        redistribution.check(local_block)
        return local_block, is_own
    return redistribution.begin(local_block), True


@dataclass(frozen=True)
class AxesTransform:
    """Transforms a local block along axes that are not divided."""

    transform: LocalTransform  # of a local block, or a piece of it
    shape: tuple[int, ...]  # of the result
    to_real: bool  # whether the result is real
    device: Host  # of the local blocks

    def __call__(self, local_block: Array, is_own: bool) -> tuple[Array, bool]:
        if local_block.size:
            return self.transform.transform(local_block, is_own), True
        return self.device.module.zeros(self.shape, self._dtype(local_block)), True

    def in_pieces(self, local_block: Array, is_own: bool) -> tuple[Any, bool]:
        """Return the result as `Pieces`, which peers read while the next is made, if it is large.

        Otherwise return it as `__call__` does.
        """
        order = self.transform.order or memory_order(local_block.strides)
        transformed_axes = {axis for _, axes, _ in self.transform.steps for axis in axes}
        axis = next((axis for axis in order if axis not in transformed_axes), None)
        if self.device.kind != "cupy" or axis is None:
            return self(local_block, is_own)
        dtype = self._dtype(local_block)
        made_bytes = prod(self.shape) * dtype.itemsize
        max_pieces = made_bytes // tuning.current.transform_piece_bytes
        count = min(MOST_PIECES, max_pieces, self.shape[axis])
        if count < 2:
            return self(local_block, is_own)
        bounds = block_bounds(split_evenly(self.shape[axis], count))
        position = axis if self.transform.order is None else order.index(axis)

        def piece(number: int) -> Array:
            along = slice(bounds[number], bounds[number + 1])
            part = local_block[(slice(None),) * position + (along,)]
            return self.transform.transform(part, is_own)

        return Pieces(dtype, axis, bounds, piece), True

    def _dtype(self, local_block: Array) -> DType:
        dtype = complex_dtype(local_block.dtype)
        return np.empty(0, dtype).real.dtype if self.to_real else dtype
