"""Memory that an assembling task needs, and the error that says so where there is too little."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dask.utils import format_bytes

from dask_p2p.errors import MemoryLimitError
from dask_p2p.types import Array

__all__ = ["Need", "in_memory_bytes", "is_out_of_memory"]

_MEMORY_ALLOCATION = 2  # of CUDA: cudaErrorMemoryAllocation, and the driver's CUDA_ERROR_...
_CURE = (
    "Smaller chunks make it fit: of the result by chunks=, of the input by rechunk; spread over "
    "more workers where all of them together lack memory. So may a smaller "
    "p2p.memory.staging-limit"
)


@dataclass(frozen=True, slots=True)
class Need:
    """What one task must have in memory at the same time, in bytes.

    Parameters
    ----------
    output_bytes
        Of its block of the result.
    staging_bytes
        Of regions on their way, at most.
    input_bytes
        Of all blocks of its own worker that it reads: Dask hands them to the task together.
    staging_limit_bytes
        The option that bounds staging.
    """

    output_bytes: int
    staging_bytes: int
    input_bytes: int
    staging_limit_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.output_bytes + self.staging_bytes + self.input_bytes

    def too_large(self, limit_bytes: int, where: str) -> MemoryLimitError:
        """Return the error for what can never fit.

        Parameters
        ----------
        limit_bytes
            All memory that there is, whatever it is used for now.
        where
            Whose memory.
        """
        return self._error(
            f"expected a block that fits into the {_bytes(limit_bytes)} of {where}, got one",
            self.total_bytes - limit_bytes,
        )

    def error(self, cause: str, where: str) -> MemoryLimitError:
        """Return the error for an allocation that failed.

        Parameters
        ----------
        cause
            By the allocator.
        where
            Whose memory.
        """
        return self._error(f"out of memory on {where} ({cause}) while assembling a block", None)

    def _error(self, head: str, missing_bytes: int | None) -> MemoryLimitError:
        missing = "" if missing_bytes is None else f"; {_bytes(missing_bytes)} are missing"
        return MemoryLimitError(
            f"{head} that needs {_bytes(self.total_bytes)}: {_bytes(self.output_bytes)} for "
            f"itself, {_bytes(self.staging_bytes)} for regions on their way, "
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
    if any(type(base).__name__ in ("memmap", "mmap") for base in _bases(block)):
        return 0
    nbytes = int(block.dtype.itemsize)
    for length, stride in zip(block.shape, block.strides, strict=True):
        nbytes *= length if stride or not length else 1
    return nbytes


def _bases(block: Array) -> Iterable[Any]:
    while block is not None:
        yield block
        block = getattr(block, "base", None)


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
