"""The interface to an array library: `Backend`. `host.HostQueue` documents its queue of work.

A new array library needs one module with a `Backend`, and one line in the registry
(`dask_p2p.backends`). The NumPy backend is the reference: every other one equals it bit for bit.
Backends move items without interpreting them: no arithmetic, no conversion, no change of byte
order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dask_p2p.backends.device import Timer as Timer
from dask_p2p.errors import BlockMismatchError, InputError, UnsupportedArrayError
from dask_p2p.types import Array, DType, DTypeLike

SLOTS = 3  # slots of a queue: one is being filled, one is being emptied, one is waiting
MOST_UNREAD = 2  # received arrays that are kept for queued kernels


class HostLink(NamedTuple):
    """Rates of copies between pinned host memory and a GPU, 1e9 bytes a second."""

    up_gbs: float  # to the GPU
    down_gbs: float  # from the GPU
    both_gbs: float  # sum of two concurrent copies, one each way


class Backend(ABC):
    """One array library.

    A new instance imports no library: methods import it when they need it, and raise
    `UnsupportedArrayError` if that fails.
    """

    name: ClassVar[str]  # name of the arrays' package; tasks and messages carry it
    title: ClassVar[str]  # the library's name in sentences
    #: True if arrays lie in device memory. Work on them continues after a call returns, and they
    #: are copied to the host before they are sent over a network.
    on_device: ClassVar[bool]
    holds_objects: ClassVar[bool]  # true if an array can hold Python objects
    most_probe_bytes: ClassVar[int]  # size of the largest block that measures a link
    #: Modules with its Fourier transforms, under NumPy's names. The first installed one is used.
    fft_modules: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def module(self) -> Any:
        """The library's package, with NumPy's functions."""

    # --- arrays ---

    @abstractmethod
    def check(self, block: Array) -> None:
        """Raise `UnsupportedArrayError` if copies of a block's items would not keep its values."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return a C-ordered array with undefined values, on the current device."""

    @abstractmethod
    def permute_into(
        self,
        dst: Array,  # any strided view that does not overlap `src`
        src: Array,  # any strided view, also a read-only, reversed or broadcast one
        axes: Sequence[int],  # axis ``d`` of `dst` is axis ``axes[d]`` of `src`
    ) -> None:
        """Do ``dst[...] = src.transpose(axes)``, bit for bit.

        On a device the work is queued on the current stream, and the call returns before its end.

        Raises `InputError` if `axes` is no permutation of the axes of `src`, and
        `BlockMismatchError` if the shape or dtype of `dst` does not match.
        """

    @abstractmethod
    def queue(self, *, leave_bandwidth: bool = False) -> Any:
        """Return a new queue of work on the current device.

        Its kernels may leave bandwidth for concurrent copies between workers.
        """

    @abstractmethod
    def to_host(self, array: Array) -> Any:
        """Return an array as a NumPy array, after the work of the current stream."""

    # --- memory for messages ---

    @abstractmethod
    def allocate(self, size_bytes: int) -> Any:
        """Return memory on the current device that other libraries may write immediately."""

    @abstractmethod
    def bytes_of(self, memory: Any, size_bytes: int, owner: Any) -> Any:
        """Return memory from `allocate` as a 1-D array of bytes whose views keep `owner` alive."""

    # --- where it runs ---

    @abstractmethod
    def is_in_use(self) -> bool:
        """Return true if this process computes with the library, without loading it."""

    @abstractmethod
    def memory_below(self, wanted_bytes: int, worker_limit_bytes: int | None) -> int | None:
        """Return the memory that arrays can have if it is less than `wanted_bytes`, else None.

        `worker_limit_bytes` is Dask's limit of the worker's host memory; None or 0: no limit.
        """

    def device_bytes(self) -> int:
        """Return the memory of the current GPU; 0 without one, or if host memory extends it."""
        return 0

    @abstractmethod
    def device_name(self) -> str:
        """Return the model of the CPU or of the current GPU."""

    def device_status(self) -> dict[str, Any]:
        """Return the current device's facts for `dask_p2p.check`; empty without a device."""
        return {}

    def host_link(self, warn: Callable[..., None]) -> HostLink | None:
        """Measure copies between the host and the current device; None without a device.

        The call blocks. If memory cannot be pinned, it calls `warn` with the reason and returns
        None.
        """
        return None

    def warm_up(self) -> None:  # noqa: B027  # optional
        """Compile kernels before their first use. This blocks: not for event loops."""

    def device_of(self, block: Array) -> Any | None:
        """Return a block's device, a context with an ``id``; None for host memory."""
        return None

    @abstractmethod
    def checksum(self, array: Array) -> int:
        """Return a checksum of an array's bytes in C order. It differs if a word differs.

        All writes to the array must have finished, on any stream. The call blocks: make it from a
        thread.
        """


def transpose_view(dst: Array, src: Array, axes: Sequence[int]) -> Any:
    """Return ``src.transpose(axes)`` after a check that `dst` has its shape and dtype.

    NumPy and CuPy would silently broadcast or convert if shapes or dtypes differ.
    """
    try:
        view = src.transpose(tuple(axes))
    except ValueError as error:
        raise InputError(
            f"expected a permutation of the {src.ndim} axes of the source, got {tuple(axes)}. "
            "Give each axis once."
        ) from error
    if dst.shape != view.shape:
        raise BlockMismatchError(
            f"expected a target of shape {view.shape} for a source of shape {src.shape} and axes "
            f"{tuple(axes)}, got {dst.shape}. Give the shape of source.transpose(axes)."
        )
    if dst.dtype != view.dtype:
        raise BlockMismatchError(
            f"expected a target of the source's dtype {view.dtype}, got {dst.dtype}. Convert with "
            "astype first; a kernel only moves items."
        )
    return view


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the memory order of the axes of an array with these strides."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -abs(strides[axis])))


@lru_cache(maxsize=64)  # one object for each dtype: NaN equals only itself
def unread_value(dtype: DType) -> Any:
    """Return the value of corners that no exchange fills: NaN or NaT if the dtype has it, else 0.

    NaN and NaT make it visible if a function reads a corner. The value is hashable, as plans are.
    """
    if dtype.kind in "fc":
        return dtype.type(np.nan)
    if dtype.kind in "mM":
        return np.array("NaT", dtype)[()]
    if dtype.kind == "V":
        return 0 if dtype.names else b""
    return np.zeros((), dtype)[()]


# Arrays that are no more than their elements, which a copy of these is equal to.
#
# Other arrays have a mask, a unit or operators of their own: masked arrays and matrices of NumPy,
# and quantities of astropy and pint. Ranks, messages and buffers have the elements alone. So values
# of users that they take are checked here.

#: Classes whose arrays have the operators of plain ones.
PLAIN = np.ndarray, np.memmap, np.recarray
#: Packages whose arrays are plain or lazy.
_PLAIN_OF = {"cupy", "cupyx", "dask", "dask_array", "dask_p2p"}


def is_plain(value: Any) -> bool:
    """Return whether a value is a plain array of NumPy or CuPy, or a value of another kind.

    Such kinds are numbers, lists and lazy arrays, and arrays whose class NumPy's functions drop.
    """
    kind = type(value)
    if kind in PLAIN or not hasattr(kind, "__array_function__"):
        return True
    return kind.__module__.partition(".")[0] in _PLAIN_OF


def check_plain(name: str, value: Any) -> None:
    """Refuse an array whose mask, unit or operators would be lost: `UnsupportedArrayError`."""
    if is_plain(value):
        return
    kind = type(value)
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedArrayError(
            f"{name}: expected a plain array or a number, got {kind.__name__}, whose mask "
            f"would be lost. Fill it first, np.ma.filled(...)."
        )
    raise UnsupportedArrayError(
        f"{name}: expected a plain array or a number, got {kind.__module__}.{kind.__name__}, "
        f"whose unit or operators would be lost. Convert it first, np.asarray(...)."
    )
