"""Memory requirement of an assembling task, and the error if there is too little memory."""

from __future__ import annotations

from typing import NamedTuple

from dask.utils import format_bytes

from dask_p2p.backends.host.pinned import bases
from dask_p2p.errors import MemoryLimitError
from dask_p2p.types import Array

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, and the driver's CUDA_ERROR_OUT_OF_MEMORY
_CURE = (
    "Use smaller chunks (chunks= for the result, rechunk for the input), or more workers if all "
    "of them together lack memory. It may also help to lower p2p.memory.staging-limit"
)


class Need(NamedTuple):
    """The peak memory of one task, by purpose."""

    output_bytes: int  # block of the result
    staging_bytes: int  # regions in transfer, at most
    input_bytes: int  # input blocks of this worker that are in memory at the same time
    staging_limit_bytes: int  # value of p2p.memory.staging-limit
    epilogue_bytes: int = (
        0  # additional memory of `OutputSpec.epilogue`, after all regions have arrived
    )

    @property
    def total_bytes(self) -> int:
        """The task's peak memory."""
        return self.output_bytes + max(self.staging_bytes, self.epilogue_bytes) + self.input_bytes

    def too_large(self, limit_bytes: int, where: str) -> MemoryLimitError:
        """Return the error for a block larger than all memory of a worker."""
        return self._error(
            f"expected a block that fits into the {_bytes(limit_bytes)} of {where}, got one",
            self.total_bytes - limit_bytes,
        )

    def error(self, cause: str, where: str) -> MemoryLimitError:
        """Return the error for a failed allocation on a worker, with the allocator's cause."""
        return self._error(f"out of memory on {where} ({cause}) while assembling a block", None)

    def _error(self, head: str, missing_bytes: int | None) -> MemoryLimitError:
        missing = "" if missing_bytes is None else f"; {_bytes(missing_bytes)} are missing"
        after = (
            f", or afterwards {_bytes(self.epilogue_bytes)} to transform it"
            if self.epilogue_bytes
            else ""
        )
        return MemoryLimitError(
            f"{head} that needs {_bytes(self.total_bytes)}: {_bytes(self.output_bytes)} for "
            f"itself, {_bytes(self.staging_bytes)} for regions in transfer{after}, "
            f"{_bytes(self.input_bytes)} for this worker's input blocks{missing}. "
            f"{_CURE} (now {_bytes(self.staging_limit_bytes)}).",
            self.total_bytes,
            missing_bytes,
        )


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an allocation failed, by NumPy, CuPy, RMM or CUDA itself."""
    # CuPy's OutOfMemoryError and RMM's std::bad_alloc are Python's MemoryError.
    return isinstance(exc, MemoryError) or (
        type(exc).__name__ in ("CUDARuntimeError", "CUDADriverError")
        and getattr(exc, "status", None) == _MEMORY_ALLOCATION
    )


def in_memory_bytes(block: Array) -> int:
    """Return a lower bound of the memory of an array.

    Repeated elements (`numpy.broadcast_to`) count once. Memory-mapped files count as 0 bytes.
    """
    if any(type(base).__name__ in ("memmap", "mmap") for base in bases(block)):
        return 0
    nbytes = int(block.dtype.itemsize)
    for length, stride in zip(block.shape, block.strides, strict=True):
        nbytes *= length if stride or not length else 1
    return nbytes


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
