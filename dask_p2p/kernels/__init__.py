"""Copy a region of one array into a region of another, with its axes permuted.

::

    src  0 1 2        permute_into(dst, src, axes=(1, 0))        dst  0 3
         3 4 5     ------------------------------------->             1 4
                                                                      2 5

There is one interface, `Kernel`, and one implementation for each kind of array. The NumPy one is
the reference; every other one equals it bit for bit. A kernel moves items and never looks into
them: no arithmetic, no conversion, no change of byte order.

Examples
--------
>>> import numpy as np
>>> from dask_p2p.kernels import kernel_for
>>> src = np.arange(6).reshape(2, 3)
>>> kernel = kernel_for(src)
>>> dst = kernel.empty((3, 2), src.dtype)
>>> kernel.permute_into(dst, src, (1, 0))
>>> dst
array([[0, 3],
       [1, 4],
       [2, 5]])
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dask_p2p.errors import UnsupportedArrayError

__all__ = [
    "Kernel",
    "as_array",
    "device_memory_below",
    "device_of",
    "kernel_for",
    "kernel_named",
    "warm_up",
]

KERNEL_NAMES = ("numpy", "cupy")


@runtime_checkable
class Kernel(Protocol):
    """What a kind of array must be able to do for this package."""

    name: str

    def check(self, block: Any) -> None:
        """Raise `UnsupportedArrayError` if copies of its items do not keep the block's values."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a C-ordered array whose values are not set."""

    def permute_into(
        self,
        dst: Any,
        src: Any,
        axes: Sequence[int],
        *,
        stream: Any | None = None,
        gently: bool = False,
    ) -> None:
        """Do ``dst[...] = src.transpose(axes)``, bit for bit.

        Parameters
        ----------
        dst
            Array of shape ``tuple(src.shape[a] for a in axes)`` and of the dtype of `src`. It may
            be any strided view. It does not overlap `src`.
        src
            Array to read: any strided view, read-only ones, reversed and broadcast ones included.
        axes
            Permutation of the axes of `src`: axis ``d`` of `dst` is axis ``axes[d]`` of `src`.
        stream
            Where to put the work, for arrays on a device; default: the current stream. A kernel on
            a device returns before the work is done, and never waits for it.
        gently
            Leave memory bandwidth to copies that go on at the same time.

        Raises
        ------
        BlockMismatchError
            If `dst` has not the shape or the dtype that `src` and `axes` ask for.
        """


def as_array(block: Any) -> Any:
    """Return a block as an array. Reductions of NumPy return scalars in place of 0-d arrays."""
    return np.asarray(block) if isinstance(block, np.generic) else block


def kernel_for(block: Any) -> Kernel:
    """Return the kernel for arrays of the kind of `block`.

    Parameters
    ----------
    block
        A NumPy or CuPy array, or a NumPy scalar. CuPy is imported only if `block` is of CuPy.

    Returns
    -------
    Kernel
        The same object at each call.

    Raises
    ------
    UnsupportedArrayError
        If plain copies of its bytes would not keep the block's values, or nothing is known of it.
    """
    block = as_array(block)
    kernel = kernel_named(_package_of(block))
    kernel.check(block)
    return kernel


def kernel_named(name: str) -> Kernel:
    """Return the kernel called `name`, ``"numpy"`` or ``"cupy"``.

    Raises
    ------
    UnsupportedArrayError
        If there is no kernel of that name, or its package cannot be imported here.
    """
    if name == "numpy":
        from dask_p2p.kernels.numpy import KERNEL as NUMPY_KERNEL

        return NUMPY_KERNEL
    if name == "cupy":
        return _cupy_kernel()
    raise UnsupportedArrayError(
        f"Expected one of the kernels {', '.join(KERNEL_NAMES)}, got {name!r}. "
        "Convert the blocks with map_blocks(np.asarray) or map_blocks(cupy.asarray) first."
    )


def device_of(*blocks: Any) -> AbstractContextManager[Any]:
    """Return a context in which the GPU that holds these blocks is the current one.

    It is the one that is current already for NumPy blocks, for none, and where several GPUs of this
    process hold them.
    """
    devices = {block.device.id: block.device for block in blocks if _package_of(block) == "cupy"}
    return devices.popitem()[1] if len(devices) == 1 else nullcontext()


def warm_up(name: str) -> None:
    """Do ahead what the first use of a kernel would wait for: compile it, where it is compiled."""
    if name == "cupy":
        from dask_p2p.kernels.cupy import warm_up as compile_ahead

        compile_ahead()


def device_memory_below(wanted_bytes: int) -> int | None:
    """Return all memory of the current GPU if arrays can have no more, and want it; else None."""
    from dask_p2p.kernels.cupy import memory_below

    return memory_below(wanted_bytes)


def _cupy_kernel() -> Kernel:
    try:
        from dask_p2p.kernels.cupy import KERNEL as CUPY_KERNEL
    except ImportError as error:
        raise UnsupportedArrayError(
            f"Expected an importable CuPy for the kernel 'cupy', got: {error}. "
            "Install dask-p2p[cuda13], or use NumPy blocks."
        ) from error
    return CUPY_KERNEL


def _package_of(block: Any) -> str:
    """Return the top-level package of the block's type, if there is a kernel for it."""
    kind = type(block)
    package = kind.__module__.partition(".")[0]
    if package not in KERNEL_NAMES:
        raise UnsupportedArrayError(
            f"Expected a numpy.ndarray or a cupy.ndarray, got {kind.__module__}."
            f"{kind.__qualname__}. Convert the blocks first: {_conversion(block)}."
        )
    return package


def _conversion(block: Any) -> str:
    """Return the call of `map_blocks` that makes plain arrays of such blocks."""
    for method in ("toarray", "todense"):  # sparse: of SciPy and CuPy, of PyData
        if hasattr(block, method):
            return f"map_blocks(lambda block: block.{method}())"
    return "map_blocks(np.asarray) or map_blocks(cupy.asarray)"
