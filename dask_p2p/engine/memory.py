"""Peak memory of a task or of a rank, and the errors about too little memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dask.utils import format_bytes

from dask_p2p.backends import backend_named
from dask_p2p.backends.host.pinned import bases
from dask_p2p.errors import MemoryLimitError
from dask_p2p.types import Array, Kind

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, and the driver's CUDA_ERROR_OUT_OF_MEMORY
SMALLER_CHUNKS = (
    "Use smaller chunks (chunks= for the result, rechunk for the input), or more workers if all "
    "of them together lack memory."
)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The peak memory of one task or one rank: bytes by purpose. Errors name the purposes."""

    always: Mapping[str, int]  # held from the start to the end
    phases: tuple[Mapping[str, int], ...] = ()  # one after another; the largest counts
    kind: Kind = "numpy"  # memory of this backend

    @property
    def peak_bytes(self) -> int:
        """The sum of `always` and of the largest phase."""
        phases_bytes = (sum(phase.values()) for phase in self.phases)
        return sum(self.always.values()) + max(phases_bytes, default=0)

    @property
    def purposes(self) -> str:
        """The bytes of each purpose as text, except for purposes without memory."""
        phases = filter(None, (" and ".join(_sizes(phase)) for phase in self.phases))
        return ", ".join(filter(None, [*_sizes(self.always), ", or afterwards ".join(phases)]))

    def __str__(self) -> str:
        return f"{_bytes(self.peak_bytes)}: {self.purposes}"

    def check(self, limit_bytes: int | None, subject: str, where: str, remedy: str) -> None:
        """Raise `MemoryLimitError` if there is a limit, which is then below the peak."""
        if limit_bytes is None:
            return
        missing_bytes = self.peak_bytes - limit_bytes
        raise MemoryLimitError(
            f"expected {subject} that fits into the {_bytes(limit_bytes)} of {self._place(where)}, "
            f"got one that needs {self}; {_bytes(missing_bytes)} are missing. {remedy}",
            self.peak_bytes,
            missing_bytes,
        )

    def error(self, cause: str, subject: str, where: str, remedy: str) -> MemoryLimitError:
        """Return the error for a failed allocation, with the allocator's cause."""
        return MemoryLimitError(
            f"out of memory on {self._place(where)} ({cause}) for {subject} that needs {self}. "
            f"{remedy}",
            self.peak_bytes,
        )

    def _place(self, where: str) -> str:
        return f"the GPU of {where}" if backend_named(self.kind).on_device else where


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether an allocation failed, by NumPy, CuPy, RMM or CUDA itself."""
    # CuPy's OutOfMemoryError and RMM's std::bad_alloc are Python's MemoryError.
    return isinstance(exc, MemoryError) or (
        type(exc).__name__ in ("CUDARuntimeError", "CUDADriverError")
        and getattr(exc, "status", None) == _MEMORY_ALLOCATION
    )


def in_memory_bytes(block: Array) -> int:
    """Return a lower bound of the memory of an array.

    Repeated elements (`numpy.broadcast_to`) count once. Memory-mapped files count as 0 bytes, and
    so do objects that are no arrays, which the check of each block refuses.
    """
    if not hasattr(block, "strides"):
        return 0
    if any(type(base).__name__ in ("memmap", "mmap") for base in bases(block)):
        return 0
    nbytes = int(block.dtype.itemsize)
    for length, stride in zip(block.shape, block.strides, strict=True):
        nbytes *= length if stride or not length else 1
    return nbytes


def _sizes(by_purpose: Mapping[str, int]) -> list[str]:
    return [f"{format_bytes(nbytes)} {name}" for name, nbytes in by_purpose.items() if nbytes]


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes < 1024 else f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
