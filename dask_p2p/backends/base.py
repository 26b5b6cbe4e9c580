"""What this package asks of an array library: `Backend`, and the `Queue` of work that it makes.

A new array library is one module with a `Backend`, and one line in the registry
(`dask_p2p.backends`). The NumPy backend is the reference: every other one equals it bit for bit.
Backends move items and never look into them: no arithmetic, no conversion, no change of byte order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

from dask_p2p.backends.host_link import HostLink
from dask_p2p.backends.timing import Timer as Timer
from dask_p2p.errors import AxesError, BlockMismatchError
from dask_p2p.types import Array, DTypeLike, Kind

#: Of a row that a kernel of a GPU writes at a time: one side of its tiles, of items up to 8 bytes.
RUN_BYTES = 512
SLOTS = 3  # of a queue: one is being filled, one is being emptied, one waits for either
MOST_UNREAD = 2  # received arrays that are kept for kernels that are queued


class Backend(ABC):
    """One array library.

    Making one imports nothing: its package is imported when a method needs it, and
    `UnsupportedArrayError` says so if that fails.
    """

    name: ClassVar[str]  # of the package whose arrays these are; tasks and messages carry it
    title: ClassVar[str]  # the library's name in sentences
    #: Whether arrays lie in the memory of a device: work on them goes on after a call returns, and
    #: they are copied to the host to be sent over a network.
    on_device: ClassVar[bool]
    holds_objects: ClassVar[bool]  # whether an array can hold Python objects
    checksum_algorithm: ClassVar[str]  # of `checksum.ALGORITHMS`: the best for its memory
    checksum_words: ClassVar[int]  # of 8 bytes, to sum at a time
    most_probe_bytes: ClassVar[int]  # size of the largest block by which a link is measured
    #: Modules with its Fourier transforms, under the names of NumPy's: the first that is
    #: installed is used.
    fft_modules: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def module(self) -> Any:
        """The library's package, with NumPy's functions."""

    # --- arrays ---

    @abstractmethod
    def check(self, block: Array) -> None:
        """Raise `UnsupportedArrayError` if copies of its items do not keep the block's values."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return a C-ordered array whose values are not set, on the current device."""

    @abstractmethod
    def permute_into(
        self,
        dst: Array,  # any strided view, which does not overlap `src`
        src: Array,  # any strided view, read-only ones, reversed and broadcast ones included
        axes: Sequence[int],  # axis ``d`` of `dst` is axis ``axes[d]`` of `src`
    ) -> None:
        """Do ``dst[...] = src.transpose(axes)``, bit for bit.

        On a device the work is put on the current stream: the call returns before it is done.

        `AxesError` if `axes` is no permutation of the axes of `src`, `BlockMismatchError` if `dst`
        has not the shape or the dtype that `src` and `axes` ask for.
        """

    @abstractmethod
    def queue(self, *, leave_bandwidth: bool = False) -> Queue:
        """Return a new queue of work on the current device.

        Its kernels may leave bandwidth to copies between workers at the same time.
        """

    @abstractmethod
    def to_host(self, array: Array) -> Any:
        """Return an array as a NumPy array, when the current stream is done with it."""

    # --- memory for messages ---

    @abstractmethod
    def allocate(self, size_bytes: int) -> Any:
        """Return memory that other libraries may write to at once, on the current device."""

    @abstractmethod
    def bytes_of(self, memory: Any, size_bytes: int, owner: Any) -> Any:
        """Return memory from `allocate` as a 1-D array of bytes whose views keep `owner` alive."""

    # --- where it runs ---

    @abstractmethod
    def is_in_use(self) -> bool:
        """Return whether this process computes with the library, without loading it."""

    @abstractmethod
    def memory_below(self, wanted_bytes: int, worker_limit_bytes: int | None) -> int | None:
        """Return the memory that arrays can have, if it is less than wanted; else None.

        Dask allows the worker so much host memory; None or 0 if there is no limit.
        """

    @abstractmethod
    def device_name(self) -> str:
        """Name what computes: the model of the processor, or of the current GPU."""

    def device_status(self) -> dict[str, Any]:
        """Return what `dask_p2p.check` says of the current device; nothing if there is none."""
        return {}

    def host_link(self, warn: Callable[..., None]) -> HostLink | None:
        """Measure copies between the host and the current device; None if there is none.

        It blocks. Where memory cannot be pinned nothing is measured, and `warn` is told why.
        """
        return None

    def warm_up(self) -> None:  # noqa: B027  # optional
        """Do ahead what the first use would wait for: compile kernels. Not for event loops."""

    def device_of(self, block: Array) -> Any | None:
        """Return the device that holds a block, a context with an ``id``; None for host memory."""
        return None

    def checksum_stream(self, array: Array) -> AbstractContextManager[Any]:
        """Return a context in which an array's checksum waits for nothing else that runs."""
        return nullcontext()


class Queue(Protocol):
    """An in-order queue of kernels for one assembled block.

    It hides what differs between host and device memory from the code that orders the work: on a
    CPU everything is done when a call returns, on a GPU when the queue is synchronised.
    """

    kind: Kind  # name of the backend of its arrays
    #: Whether its output had better lie in pinned memory: it comes from a GPU.
    pinned_output: bool

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return a new C-ordered array of the queue's kind for others, its values undefined."""

    def scratch(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return the same for the package's own use: drop it when all work with it is done."""

    def wait_until_written(self, blocks: Iterable[Any], *, any_stream: bool) -> None:
        """Wait until others have written these blocks; see `dask_p2p.backends.device`."""

    def permute(
        self, dst: Array, src: Array, axes: Sequence[int], *, concurrent: bool = False
    ) -> None:
        """Do ``dst[...] = src.transpose(axes)`` after what was queued before.

        Concurrent: in no order with the rest, and at the same time where there is room.
        """

    def permute_and_drop(self, dst: Array, src: Array, axes: Sequence[int]) -> None:
        """Do the same with an array of any backend that only the caller refers to.

        The caller can drop it at once: it is kept until it has been read.
        """

    def fill(self, dst: Array, value: Any) -> None:
        """Write one item everywhere, bit for bit: a NumPy array of no dimensions, of its dtype."""

    def prefetch(self, src: Array, slot_bytes: int) -> Any:
        """Begin to copy a part of a block that lies in another GPU's memory.

        It is put into place by `permute_prefetched`, which takes what is returned here. Of `SLOTS`
        parts one has to be put into place before the next can be brought. Parts of at most
        `slot_bytes` may go through local memory; larger ones are read in place. The part is kept
        until all that is queued is done.
        """

    def permute_prefetched(self, dst: Array, part: Any, axes: Sequence[int]) -> None:
        """Do ``dst[...] = part.transpose(axes)`` with a part from `prefetch`."""

    def pack(self, dst: Array, src: Array) -> Callable[[], None]:
        """Queue a copy of a region into a C-ordered array; return a function that waits for it."""

    def to_host(self, array: Array) -> Any:
        """Return an array of `scratch` as a NumPy array, after what was queued before."""

    def timing(self, timer: Timer) -> AbstractContextManager[None]:
        """Return a context that adds what it took to `timer`, when that is synchronised.

        It does not nest. Of a device these are the seconds of kernels and of copies from other
        GPUs, on each stream from the beginning of the first to the end of the last: whatever runs
        at the same time is not taken off. Waiting for slots is not counted. Of the host it is the
        whole block's time.
        """

    def synchronize(self) -> None:
        """Wait until everything queued is done."""


def transposed(dst: Array, src: Array, axes: Sequence[int]) -> Any:
    """Return ``src.transpose(axes)``, once it is sure that `dst` fits it.

    NumPy and CuPy would broadcast or convert where shapes or dtypes differ, silently.
    """
    try:
        view = src.transpose(tuple(axes))
    except ValueError as error:
        raise AxesError(
            f"Expected a permutation of the {src.ndim} axes of the source, got {tuple(axes)}. "
            "Give each axis once."
        ) from error
    if dst.shape != view.shape:
        raise BlockMismatchError(
            f"Expected a target of shape {view.shape} for a source of shape {src.shape} and axes "
            f"{tuple(axes)}, got {dst.shape}. Give the shape of source.transpose(axes)."
        )
    if dst.dtype != view.dtype:
        raise BlockMismatchError(
            f"Expected a target of the source's dtype {view.dtype}, got {dst.dtype}. Convert with "
            "astype first; a kernel only moves items."
        )
    return view


def order_of(strides: Sequence[int]) -> tuple[int, ...]:
    """Return in which order the axes of an array with these strides lie in memory."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -abs(strides[axis])))


def as_it_lies(array: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a view whose axes lie in memory in their order, and what turns such views back."""
    order = order_of(array.strides)
    back = tuple(map(order.index, range(array.ndim)))
    return array.transpose(order), lambda lies: lies.transpose(back)
