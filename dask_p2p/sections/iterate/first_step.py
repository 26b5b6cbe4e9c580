"""Checks of the function of `iterate`, made in its first step.

Each check finds a program that would return wrong values without an error: a function that leaves
elements unset, writes into its fields, loses fractions, or reads corners that are not exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_p2p.backends.base import unread_value
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray, HaloPart
from dask_p2p.sections.iterate.step_function import StepFunction
from dask_p2p.types import Array, DType

_MARKS = (b"\xa5", b"\x5a")  # bytes of unset elements: data may equal one of the marks
_SEED = 0xA5A5A5A5  # of the zeros and ones that mark an unset corner
_CORNER = 64  # elements along each axis
_LEAST_MARKED = 64  # fewest zeros and ones that hardly occur by chance


class FirstStep:
    """The first step of a local block.

    Parameters
    ----------
    step : StepFunction
        Calls the user's function.
    device : Host
        Device of the local block.
    fields : sequence of HaloArray
        The fields that the function reads.
    given : sequence
        Its arguments: the data of the fields, then constants.
    part : HaloPart
        The data of the newest field, as the function receives it.
    spare : HaloArray
        Memory of the next field, which the step fills.
    """

    def __init__(
        self,
        step: StepFunction,
        device: Host,
        fields: Sequence[HaloArray],
        given: Sequence[Any],
        part: HaloPart,
        spare: HaloArray,
    ) -> None:
        self._step, self._device, self._fields = step, device, fields
        self._given, self._part, self._spare = given, part, spare

    def __call__(self) -> tuple[Any, ...]:
        """Make the step; return the numbers for `until`.

        Raises
        ------
        BlockMismatchError
            If the function leaves elements unset, or fills in numbers of another kind.
        InputError
            If it writes into its fields, or reads corners that are not exchanged.
        """
        before = self._sums()
        numbers = self._filled() if self._step.fills_out else self._made()
        if self._sums() != before:
            raise InputError(
                "expected a function that only reads its fields and constants, got one that writes "
                "into them. Write into a copy, u = u.copy(), or into the parameter out."
            )
        if self._spare.exchange.halo.unread:
            self._check_corners()
        return numbers

    def _made(self) -> tuple[Any, ...]:
        return self._step(self._given, self._spare.inner, self._part)

    def _sums(self) -> list[int]:
        """Return checksums of the arguments that the function could write into."""
        kinds = self._device.module.ndarray
        arrays = [] if self._device.has_read_only else self._given
        return [self._device.checksum(each) for each in arrays if isinstance(each, kinds)]

    def _filled(self) -> tuple[Any, ...]:
        """Call the function, and check that it fills its whole parameter `out`."""
        out = self._spare.inner
        marks = marked(out, self._device)
        returned = self._recorded(out)
        if marks is not None and marks.is_left():
            marks.put_others()  # data may equal the first marks
            self._step.call(self._given, out)
            marks.check()
        return self._step.numbers(returned, out)

    # --- numbers of the fields' kind

    def _recorded(self, out: Array) -> Any:
        """Call the function, if possible with a view of `out` that refuses lossy writes."""
        recorder = self._device.recorder(out) if out.dtype.kind in "biuf" else None
        if recorder is not None:
            try:
                returned = self._step.call(self._given, recorder)
            except (BlockMismatchError, InputError):
                raise
            except Exception:  # a compiled function takes plain arrays only
                recorder = None
        if recorder is None or not recorder.was_written:
            self._check_wider(out)
        return self._step.call(self._given, out) if recorder is None else returned

    def _check_wider(self, out: Array) -> None:
        """Refuse a function that fills fractions into an array that can hold them."""
        if out.dtype.kind not in "biu":
            return
        wide = self._device.zeros(out.shape, np.float64 if out.dtype.itemsize > 2 else np.float32)
        try:
            self._step.call(self._given, wide)
        except Exception:  # it fills integers only
            return
        module = self._device.module
        lost = int(module.count_nonzero(wide != module.floor(wide)))
        if lost:
            raise BlockMismatchError(
                f"expected a function that fills its parameter out with values of {out.dtype}, got "
                f"one that fills {lost} of {out.size} elements with fractions. Give the dtype of "
                f"the fields, iterate(..., dtype=float), or round the values."
            )

    # --- no corners

    def _check_corners(self) -> None:
        """Refuse a function whose results change with corners that are not exchanged."""
        made, dtype = self._device.checksum(self._spare.data), self._spare.exchange.dtype
        with np.errstate(all="ignore"):
            has_changed = any(self._sum_with(value) != made for value in fillings(dtype))
        # Results that differ even for the same corners come from random numbers.
        if has_changed and self._sum_with(unread_value(dtype)) == made:
            raise InputError(
                "corners=False: expected a function that reads no corners of the halo, where two "
                "axes' halos meet, got one whose results change with them. Leave corners=False out."
            )
        for field in self._fields:
            field.fill_unread(unread_value(dtype))

    def _sum_with(self, value: Any) -> int:
        """Make the step with a value in all corners; return the checksum of its result."""
        for field in self._fields:
            field.fill_unread(value)
        self._made()
        return self._device.checksum(self._spare.data)


def fillings(dtype: DType) -> list[Any]:
    """Return test values for corners: a function that reads corners notices one of them."""
    if dtype.kind in "fc":
        return [dtype.type(1), dtype.type(np.inf), dtype.type(-np.inf)]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return [dtype.type(value) for value in (1, 2, limits.max, limits.min)]
    ones = np.frombuffer(b"\1" * dtype.itemsize, dtype)[0] if dtype.itemsize else None
    return [] if ones is None or dtype.kind == "U" else [ones]


class _Values:
    """Marks of unset elements: one value that no function writes by accident."""

    def __init__(self, out: Array, device: Host) -> None:
        self._out, self._device = out, device
        self._mark, self._other = (
            np.frombuffer(byte * out.dtype.itemsize, out.dtype)[0] for byte in _MARKS
        )
        self._left: Any = None  # elements that had the first mark
        out[...] = self._mark

    def is_left(self) -> bool:
        return self._count(self._out == self._mark) > 0

    def put_others(self) -> None:
        self._left = self._out == self._mark
        self._out[self._left] = self._other

    def check(self) -> None:
        if left := self._count(self._left & (self._out == self._other)):
            raise _unfilled(self._out, left)

    def _count(self, chosen: Array) -> int:
        return int(self._device.module.count_nonzero(chosen))


class _Pattern:
    """Marks of small elements: a pattern of zeros and ones in a corner.

    A function may write each of these values, but hardly the whole pattern.
    """

    def __init__(self, out: Array, device: Host) -> None:
        self._out, self._device = out, device
        self._corner = out[(slice(_CORNER),) * out.ndim]
        draw = np.random.default_rng(_SEED)
        self._marks = draw.integers(0, 2, self._corner.shape).astype(out.dtype)
        device.copy_from_host(self._corner, self._marks)

    def is_left(self) -> bool:
        return np.array_equal(self._device.to_host(self._corner), self._marks)

    def put_others(self) -> None:
        self._marks = 1 - self._marks if self._marks.dtype != bool else ~self._marks
        self._device.copy_from_host(self._corner, self._marks)

    def check(self) -> None:
        if self.is_left():
            raise _unfilled(self._out, self._corner.size)


def marked(out: Array, device: Host) -> _Values | _Pattern | None:
    """Put marks into memory that the function must fill; None if its dtype or size allows none."""
    if out.dtype.kind not in "biufcmM":
        return None
    if out.dtype.itemsize >= 4:
        return _Values(out, device)
    is_enough = np.prod([min(size, _CORNER) for size in out.shape]) >= _LEAST_MARKED
    return _Pattern(out, device) if is_enough else None


def _unfilled(out: Array, left: int) -> BlockMismatchError:
    return BlockMismatchError(
        f"expected the function to fill its parameter out, of shape {out.shape}, but it left "
        f"{left} of {out.size} elements as they were. Write to all of them, out[...] = ..."
    )
