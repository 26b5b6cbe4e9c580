"""Memory that refuses numbers of another kind, in place of dropping parts of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dask_p2p.backends import backend_for
from dask_p2p.errors import BlockMismatchError
from dask_p2p.types import Array, DType


class Recorder:
    """Part of an array's class that refuses assignments which would be made with a loss.

    ``out[...] = values`` drops fractions and imaginary parts without an error. Ufuncs refuse to do
    that by themselves.

    Attributes
    ----------
    memory : array
        The whole array, of which this one may be a view.
    was_written : bool
        Whether an assignment or a ufunc wrote to it. Kernels and compiled functions write
        otherwise.
    """

    module: Any  # of the arrays
    memory: Any
    was_written: bool

    def __array_finalize__(self, obj: Any) -> None:
        self.memory = getattr(obj, "memory", self)

    def __setitem__(self, key: Any, value: Any) -> None:
        own: Any = self
        if self.module.may_share_memory(own, self.memory):  # and is no copy
            check_kept(value, own.dtype, "assign")
            self.memory.was_written = True
        super().__setitem__(key, value)  # type: ignore[misc]

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **kwargs: Any
    ) -> Any:
        if out:
            kwargs["out"] = tuple(map(_plain, out))
            for target in out:
                if isinstance(target, Recorder):
                    target.memory.was_written = True
        made = getattr(ufunc, method)(*map(_plain, inputs), **kwargs)
        return out[0] if len(out) == 1 else made


def recorder_of(array: Array) -> Any:
    """Return a view of an array that refuses numbers of another kind: a `Recorder`."""
    made = array.view(type=_class_for(backend_for(array).module))
    made.memory, made.was_written = made, False
    return made


@cache
def _class_for(module: Any) -> type:
    return type("Recorder", (Recorder, module.ndarray), {"module": module})


def _plain(value: Any) -> Any:
    """Return a recorder as an array, and any other value as it is."""
    array: Any = value
    return array.view(type=value.module.ndarray) if isinstance(value, Recorder) else value


def check_kept(value: Any, dtype: DType, verb: str) -> None:
    """Refuse values that would lose their fractions or imaginary parts in fields of a dtype."""
    if not is_kept(value, dtype):
        raise BlockMismatchError(
            f"expected an array that becomes {dtype} from the function, got "
            f"{np.asarray(value).dtype if np.isscalar(value) else value.dtype}. Give the dtype of "
            f"the fields, iterate(..., dtype=...), or {verb} values of {dtype}, a.astype(...)."
        )


def is_kept(value: Any, dtype: DType) -> bool:
    """Return whether values stay the same kind of number when they become a dtype.

    Signed integers become unsigned ones if no value changes. A number of Python only has to keep
    its value: 0 is one of any dtype.
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
