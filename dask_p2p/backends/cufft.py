"""Transforms of CuPy arrays by cached plans.

`cupyx.scipy.fft` takes the host 0.1 ms before and after each call of a plan, as long as a GPU needs
to transform 30 MB. This module prepares once for all similar calls. It passes all other calls to
`cupyx.scipy.fft`: other dtypes, trimmed or padded arrays, scaling, and other functions.
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
    """Call the function of this name in `cupyx.scipy.fft` on a C-ordered array, or its plan."""
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
    key = values, block.shape, block.dtype, lengths, axes, stream.ptr, block.data.device_id
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
        return None
    try:
        return _import_library().get_fft_plan(block, lengths, axes, values)
    except ValueError:  # from CuPy: cuFFT has no such plan
        return None


def _import_library() -> Any:
    return import_module("cupyx.scipy.fft")
