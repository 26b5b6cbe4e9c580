"""Memory that an assembling task needs, and the error that says so where there is too little."""

from __future__ import annotations

from typing import NamedTuple

from dask.utils import format_bytes

from dask_p2p.backends.pinned import bases
from dask_p2p.errors import MemoryLimitError
from dask_p2p.types import Array

_MEMORY_ALLOCATION = 2  # of CUDA: cudaErrorMemoryAllocation, and the driver's CUDA_ERROR_...
_CURE = (
    "Smaller chunks make it fit: of the result by chunks=, of the input by rechunk; spread over "
    "more workers where all of them together lack memory. It may also help "
    "to lower p2p.memory.staging-limit"
)


class Need(NamedTuple):
    """What one task must have in memory at the same time."""

    output_bytes: int  # of its block of the result
    staging_bytes: int  # of regions on their way, at most
    input_bytes: int  # of blocks of its own worker that it reads, as many as at the same time
    staging_limit_bytes: int  # by the option that bounds staging
    post_bytes: int = 0  # of what is done to the assembled block, beside it, once regions are here

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.output_bytes + max(self.staging_bytes, self.post_bytes) + self.input_bytes

    def too_large(self, limit_bytes: int, where: str) -> MemoryLimitError:
        """Return the error for what can never fit into all memory that there is somewhere."""
        return self._error(
            f"expected a block that fits into the {_bytes(limit_bytes)} of {where}, got one",
            self.total_bytes - limit_bytes,
        )

    def error(self, cause: str, where: str) -> MemoryLimitError:
        """Return the error for an allocation that failed somewhere, with the allocator's cause."""
        return self._error(f"out of memory on {where} ({cause}) while assembling a block", None)

    def _error(self, head: str, missing_bytes: int | None) -> MemoryLimitError:
        missing = "" if missing_bytes is None else f"; {_bytes(missing_bytes)} are missing"
        after = (
            f", or after that {_bytes(self.post_bytes)} to transform it" if self.post_bytes else ""
        )
        return MemoryLimitError(
            f"{head} that needs {_bytes(self.total_bytes)}: {_bytes(self.output_bytes)} for "
            f"itself, {_bytes(self.staging_bytes)} for regions on their way{after}, "
            f"{_bytes(self.input_bytes)} for the blocks here that it is made of{missing}. "
            f"{_CURE} (now {_bytes(self.staging_limit_bytes)}).",
            self.total_bytes,
            missing_bytes,
        )


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an allocation failed: of NumPy, CuPy and RMM, or of CUDA itself."""
    # CuPy's OutOfMemoryError and RMM's std::bad_alloc are Python's MemoryError.
    return isinstance(exc, MemoryError) or (
        type(exc).__name__ in ("CUDARuntimeError", "CUDADriverError")
        and getattr(exc, "status", None) == _MEMORY_ALLOCATION
    )


def in_memory_bytes(block: Array) -> int:
    """Return how much memory an array takes at least, as far as can be told.

    Elements that are repeated (`numpy.broadcast_to`) are there once, and what a file is mapped to
    need not be there at all.
    """
    if any(type(base).__name__ in ("memmap", "mmap") for base in bases(block)):
        return 0
    nbytes = int(block.dtype.itemsize)
    for length, stride in zip(block.shape, block.strides, strict=True):
        nbytes *= length if stride or not length else 1
    return nbytes


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
