"""What a reader asks for, and what it gets: requests in, regions out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.config import Options
from dask_p2p.geometry import Box, box_size, split_box, taper_last
from dask_p2p.transports.footprint import Footprint
from dask_p2p.types import Array, DType, Kind

__all__ = ["LAST_PART_BYTES", "Bring", "Reading", "Region", "Request"]

LAST_PART_BYTES = 2**24  # which kernels put into place in 10 µs

#: Returns a region's array: see `Region.result`, which calls it with the same arguments.
Bring = Callable[[float | None, Array | None], Any]


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of a block of another worker, which is as the Dask array declares it."""

    key: Any  # Dask key
    holder: str  # address of the worker that holds it
    shape: tuple[int, ...]
    dtype: DType  # numpy.dtype
    kind: Kind  # that is wanted here: "numpy" or "cupy"
    boxes: Sequence[Box]

    def __str__(self) -> str:
        return f"block {self.key!r} of {self.holder}"


@dataclass(slots=True)
class Region:
    """A part of what is requested, small enough to be asked for at once."""

    request: int  # number among the requests
    piece: int  # number of the box, among those of the request
    box: Box
    bring: Bring | None = None  # once it is asked for
    done: Callable[[], bool] | None = None  # whether `bring` ends soon; None: it does
    error: Exception | None = None  # why it will not come
    prefetched: Any = None  # for the reader: what its queue copies here, if it lies elsewhere

    def on_its_way(self, bring: Bring, done: Callable[[], bool] | None = None) -> Region:
        """Return it, now that it is asked for."""
        self.bring, self.done = bring, done
        return self

    def failed(self, error: Exception) -> Region:
        """Return it as one that will not come."""
        self.error = error
        return self

    def is_here(self) -> bool:
        """Return whether nothing has to be waited for: `result` ends soon."""
        return self.done is None or self.done()

    def result(self, timeout_s: float | None = None, into: Array | None = None) -> Any:
        """Wait until it is here, and return its array: once. It is the caller's own from here on.

        That is `into`, where the region belongs, if the transport can bring it straight there.

        Raises
        ------
        TransferError, BlockMismatchError
            If it will not come.
        TimeoutError
            If it does not come in time, and nobody has noticed.
        """
        if self.error is not None:
            raise self.error
        assert self.bring is not None
        return self.bring(timeout_s, into)


class Reading(ABC):
    """Regions of one holder's blocks on their way here.

    Iterating asks for one region after another.

    Attributes
    ----------
    ahead : int
        Regions that may be asked for while the one before them is put into place.
    part_bytes : int or None
        Of the largest part; None if there is no limit.
    """

    def __init__(self, requests: Sequence[Request], footprint: Footprint, options: Options) -> None:
        self.requests = requests
        self.part_bytes = footprint.part_bytes
        # A part has one item at least: larger ones go one at a time.
        is_small = self.part_bytes is not None and self.part_bytes < requests[0].dtype.itemsize
        is_alone = is_small or options.mode == "sync"
        self.ahead = 0 if is_alone else footprint.parts_in_flight
        self._dropped: set[int] = set()

    @abstractmethod
    def __iter__(self) -> Iterator[Region]:
        """Ask for the next regions."""

    def drop(self, request: int) -> None:
        """Ask for nothing more of this request, which has failed."""
        self._dropped.add(request)

    def confirm(self) -> None:  # noqa: B027  # optional
        """Raise `TransferError` if what was read may be wrong, now that all reading is done.

        That is for transports whose holder can go away under a reader that cannot notice.
        """

    @abstractmethod
    def close(self) -> None:
        """End all leases. Whatever is still under way is given up. Idempotent."""

    def parts(self, *, is_tapered: bool = False) -> Iterator[Region]:
        """Cut what is requested into parts, but for what was dropped.

        They are made as late as may be: a region can have hundreds of parts, and the first should
        soon be here. With `is_tapered` the last parts are smaller and smaller: nothing comes any
        more while the end of the last one is put into place.
        """
        last = len(self.requests) - 1
        for number, request in enumerate(self.requests):
            itemsize = max(1, request.dtype.itemsize)
            for piece, box in enumerate(request.boxes):
                size = box_size(box)
                limit = size if self.part_bytes is None else self.part_bytes // itemsize
                boxes = split_box(box, max(1, limit)) if size else iter([box])
                if is_tapered and number == last and self.part_bytes is not None:
                    boxes = taper_last(boxes, max(1, LAST_PART_BYTES // itemsize))
                for part in boxes:
                    if number in self._dropped:
                        break
                    yield Region(number, piece, part)
