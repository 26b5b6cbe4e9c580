"""Transforms of CuPy arrays by cached plans.

`cupyx.scipy.fft` takes the host 0.1 ms before and after each call of a plan, as long as a GPU needs
to transform 30 MB. This module prepares once for all similar calls. It passes all other calls to
`cupyx.scipy.fft`: other dtypes, trimmed or padded arrays, scaling, and other functions.

CuPy moves an axis to the end before it transforms along it, and returns a view. Elementwise kernels
of CuPy take five times as long on such a view: 14 ms in place of 2.6 for 4 GiB on an H200. So this
module transforms along the first axis where the array is, if that takes cuFFT no work area.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from dask_p2p.types import Array

_MOST_PLANS = 16  # plans that a thread keeps, as in CuPy: each has a work area
# By function: the types of its input and output, and cuFFT's direction.
_KINDS = {"fftn": ("C2C", -1), "ifftn": ("C2C", 1), "rfftn": ("R2C", -1), "irfftn": ("C2R", 1)}
_COMPLEX, _REAL = ("complex64", "complex128"), ("float32", "float64")
_DTYPES = {"C2C": _COMPLEX, "C2R": _COMPLEX, "R2C": _REAL}
# Longest transform along the first axis. For complex64 of 1024 x 1024 x 512, cuFFT takes 3.0 ms in
# place of 2.1, and a copy to C order 2.2. For complex128 of 1000 rows it takes 28 ms, and as much
# memory as the array has.
_MOST_ALONG_FIRST = 4096


def is_quick_along_first(length: int) -> bool:
    """Return whether complex transforms along the first of several axes need no other order."""
    return 1 < length <= _MOST_ALONG_FIRST and length.bit_count() == 1


class _ThreadPlans(threading.local):
    """A thread's plans, one for each stream, because a plan has a single work area."""

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


_thread_plans = _ThreadPlans()


def _transform(
    name: str,
    block: Array,
    lengths: Sequence[int],
    axes: Sequence[int],
    norm: str = "backward",
    overwrite_x: bool = False,
) -> Array:
    """Call the function of this name in `cupyx.scipy.fft` on a C-ordered array, or its plan.

    An array to overwrite, transformed along its first axis, may have other strides along that one.
    """
    values, direction = _KINDS[name]
    is_unscaled = norm == ("forward" if direction > 0 else "backward")
    plan = _find_plan(values, block, tuple(lengths), tuple(axes)) if is_unscaled else None
    if plan is None:
        return _transform_by_cupy(name, block, lengths, axes, norm=norm, overwrite_x=overwrite_x)
    if values == "C2R" and not overwrite_x:
        block = block.copy()  # cuFFT overwrites it
    is_in_place = values == "C2C" and overwrite_x
    out: Array = block if is_in_place else plan.get_output_array(block)
    plan.fft(block, out, direction)
    return out


def _transform_by_cupy(name: str, block: Array, *args: Any, **options: Any) -> Array:
    result: Array = getattr(_import_library(), name)(block, *args, **options)
    return result


def _transform_axis(name: str, block: Array, length: int, axis: int, **options: Any) -> Array:
    return _transform(name, block, (length,), (axis,), **options)


fftn, ifftn, rfftn, irfftn = (partial(_transform, name) for name in _KINDS)
rfft, irfft = (partial(_transform_axis, name) for name in ("rfftn", "irfftn"))
hfft, ihfft = (partial(_transform_by_cupy, name) for name in ("hfft", "ihfft"))


def _find_plan(values: str, block: Array, lengths: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """Return a cached or new plan for the current stream; None if there is no suitable plan."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    layout = block.shape, block.strides, block.dtype
    key = values, layout, lengths, axes, stream.ptr, block.data.device_id
    plans = _thread_plans.plans
    if key in plans:
        plans.move_to_end(key)
    else:
        plans[key] = _make_plan(values, block, lengths, axes)
        if len(plans) > _MOST_PLANS:
            plans.popitem(last=False)
    return plans[key]


def _make_plan(values: str, block: Array, lengths: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    input_lengths = list(lengths)
    if values == "C2R":
        input_lengths[-1] = input_lengths[-1] // 2 + 1
    shape = [block.shape[axis] for axis in axes]
    if block.dtype.name not in _DTYPES[values] or shape != input_lengths:
        return None
    in_order = sorted(axes) if values == "C2C" else [*axes]
    if in_order != [*range(block.ndim)][-len(axes) :]:
        is_first = axes == (0,) and values == "C2C" and is_quick_along_first(*lengths)
        return _plan_along_first(block) if is_first else None
    try:
        return _import_library().get_fft_plan(block, lengths, axes, values)
    except ValueError:  # from CuPy: cuFFT has no such plan
        return None


def _plan_along_first(block: Array) -> Any:
    from cupy.cuda import cufft

    length, distance = block.shape[0], block.strides[0] // block.itemsize
    kind = cufft.CUFFT_C2C if block.dtype == "complex64" else cufft.CUFFT_Z2Z
    layout = (length,), distance, 1  # of the input and the output
    return cufft.PlanNd((length,), *layout, *layout, kind, block.size // length, "C", 0, length)


def _import_library() -> Any:
    return import_module("cupyx.scipy.fft")
