"""Fields of `iterate` that are numbers, the same on all ranks: a time, or a time step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_p2p.backends.plain import check_plain
from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.inputs import checked_dtype
from dask_p2p.sections.context.context import Context
from dask_p2p.types import DTypeLike


@dataclass(frozen=True)
class ScalarSpec:
    """One number: its name, and its value before the first step."""

    name: str
    value: Any  # a NumPy scalar


def is_scalar(value: Any) -> bool:
    """Return whether the value of a field is a number."""
    is_plain = isinstance(value, (bool, int, float, complex, np.number, np.bool_))
    return is_plain or (isinstance(value, np.ndarray) and not value.ndim)


def scalar_spec(name: str, value: Any, dtype: DTypeLike | None) -> ScalarSpec:
    """Return the spec of a number; its dtype is that of `value` by default."""
    check_plain(name, value)
    own = np.asarray(value)
    dtype = own.dtype if dtype is None else checked_dtype("dtype", dtype)
    if own.dtype.kind not in "biufc" or not np.can_cast(own.dtype, dtype, "same_kind"):
        raise InputError(
            f"expected a number that becomes {dtype} as the field {name!r}, got "
            f"{value!r}. Give another dtype, dask_p2p.Field({value!r}, dtype=...)."
        )
    return ScalarSpec(name, own.astype(dtype)[()])


class Scalars:
    """The numbers of one rank."""

    def __init__(self, specs: Sequence[ScalarSpec], ctx: Context) -> None:
        self._ctx = ctx
        #: The newest values.
        self.values: dict[str, Any] = {spec.name: spec.value for spec in specs}

    def update(self, values: Mapping[str, Any]) -> None:
        """Take over new values that a function has returned."""
        for name, value in values.items():
            check_plain(f"the field {name!r}", value)
            dtype = self.values[name].dtype
            own = np.asarray(self._ctx.device.to_host(value))
            if own.ndim or not np.can_cast(own.dtype, dtype, "same_kind"):
                raise BlockMismatchError(
                    f"expected a number that becomes {dtype} from the function as the field "
                    f"{name!r}, got {own.dtype} of shape {own.shape}. Give the field another "
                    f"number at the start, such as 0.0 in place of 0."
                )
            self.values[name] = own.astype(dtype)[()]

    def check(self) -> None:
        """Raise `BlockMismatchError` if a number differs between ranks."""
        if not self.values:
            return
        own = np.array([*self.values.values()], complex)
        both = np.stack([own.real, own.imag, -own.real, -own.imag])
        least, most = self._ctx.allreduce(both, "min"), -self._ctx.allreduce(-both, "min")
        for name, low, high in zip(self.values, least.T, most.T, strict=True):
            if not np.array_equal(low, high, equal_nan=True):
                raise BlockMismatchError(
                    f"expected the same number from the function on all ranks as the field "
                    f"{name!r}, got {low[0]:g} to {high[0]:g}. Compute it from numbers that all "
                    f"ranks have: record a value of all ranks, and read at.last[...]."
                )
