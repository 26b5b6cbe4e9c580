"""Arrays that refuse lossy assignments, such as complex numbers to a real array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dask_p2p.backends import backend_for
from dask_p2p.backends.plain import check_plain
from dask_p2p.errors import BlockMismatchError
from dask_p2p.types import Array, DType


@dataclass
class Writes:
    """The memory of a recorder and its views, and whether any of them was written."""

    memory: Array
    were_made: bool = False


class Recorder:
    """Mixin of array classes that refuses lossy assignments, and records writes.

    ``out[...] = values`` drops fractions and imaginary parts without an error. Ufuncs raise errors
    by themselves.

    Attributes
    ----------
    writes : Writes
        Those of assignments and ufuncs, to this array or a view of the same memory. Writes of
        kernels and compiled functions are not recorded.
    """

    module: Any  # array module: numpy or cupy
    writes: Any

    def __array_finalize__(self, obj: Any) -> None:
        self.writes = getattr(obj, "writes", None)

    @property
    def was_written(self) -> bool:
        """True if there was a write."""
        return bool(self.writes.were_made)

    def __setitem__(self, key: Any, value: Any) -> None:
        own: Any = self
        writes = self.writes
        if writes is not None and self.module.may_share_memory(own, writes.memory):  # no copy
            check_kept(value, own.dtype, "assign")
            writes.were_made = True
        super().__setitem__(key, value)  # type: ignore[misc]

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **kwargs: Any
    ) -> Any:
        if out:
            kwargs["out"] = tuple(map(_plain, out))
            for target in out:
                if isinstance(target, Recorder):
                    target.writes.were_made = True
        made = getattr(ufunc, method)(*map(_plain, inputs), **kwargs)
        return out[0] if len(out) == 1 else made


def recorder_of(array: Array) -> Any:
    """Return a view of an array that is a `Recorder`."""
    made = array.view(type=_class_for(backend_for(array).module))
    made.writes = Writes(array)
    return made


@cache
def _class_for(module: Any) -> type:
    return type("Recorder", (Recorder, module.ndarray), {"module": module})


def _plain(value: Any) -> Any:
    """Return a recorder as a plain array, and any other value unchanged."""
    array: Any = value
    return array.view(type=value.module.ndarray) if isinstance(value, Recorder) else value


def check_kept(value: Any, dtype: DType, verb: str) -> None:
    """Raise `BlockMismatchError` if values lose fractions or imaginary parts in a dtype.

    Raises `UnsupportedArrayError` if they are more than their elements.
    """
    check_plain("the value of the function", value)
    if not is_kept(value, dtype):
        raise BlockMismatchError(
            f"expected an array from the function that can be converted to {dtype} without loss, "
            f"got {np.asarray(value).dtype if np.isscalar(value) else value.dtype}. Give the dtype "
            f"of the fields, iterate(..., dtype=...), or {verb} values of {dtype}, a.astype(...)."
        )


def is_kept(value: Any, dtype: DType) -> bool:
    """Return whether values keep their kind of number when they are converted to a dtype.

    Signed integers may be converted to unsigned ones if no value changes. A Python number only has
    to keep its value: 0 has any dtype.
    """
    kind: DType = getattr(value, "dtype", None) or np.asarray(value).dtype
    if np.can_cast(kind, dtype, "same_kind"):
        return True
    is_plain = isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic)
    if {kind.kind, dtype.kind} <= set("iu") or (is_plain and dtype.kind in "biufc"):
        with np.errstate(all="ignore"):
            given = np.asarray(value) if is_plain else value
            return bool((given.astype(dtype) == given).all())
    return False
