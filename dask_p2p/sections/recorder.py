"""Memory that refuses numbers of another kind, in place of dropping parts of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_p2p.errors import BlockMismatchError
from dask_p2p.types import Array, DType


class Recorder(np.ndarray):
    """An array that refuses assignments which NumPy would make with a loss.

    ``out[...] = values`` drops fractions and imaginary parts without an error. Ufuncs refuse to do
    that by themselves.

    Attributes
    ----------
    memory : Recorder
        The whole array, of which this one may be a view.
    was_written : bool
        Whether it was written to by NumPy. Compiled functions write otherwise.
    """

    memory: Recorder
    was_written: bool

    @classmethod
    def of(cls, array: Array) -> Recorder:
        """Return a view of an array."""
        made: Recorder = array.view(cls)
        made.memory, made.was_written = made, False
        return made

    def __array_finalize__(self, obj: Any) -> None:
        self.memory = getattr(obj, "memory", self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if np.may_share_memory(self, self.memory):  # and is no copy
            check_kept(value, self.dtype, "assign")
            self.memory.was_written = True
        super().__setitem__(key, value)

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


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Recorder) else value


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

    Signed integers become unsigned ones if no value changes. A single number only has to keep its
    value: 0 is one of any dtype.
    """
    kind: DType = getattr(value, "dtype", None) or np.asarray(value).dtype
    if np.can_cast(kind, dtype, "same_kind"):
        return True
    is_integer = kind.kind in "iu" and dtype.kind in "iu"
    if is_integer or (np.ndim(value) == 0 and {kind.kind, dtype.kind} <= set("biufc")):
        with np.errstate(all="ignore"):
            if np.ndim(value) == 0:
                value = np.asarray(value) if np.isscalar(value) else value
            changed = value.astype(dtype)
            return bool((changed == value).all())
    return False
