"""Blocks of another process that are read where they lie, each under a lease."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from dask_p2p.errors import BlockMismatchError, BlockUnavailableError, TransferError
from dask_p2p.layout import Box, box_slices
from dask_p2p.transports.directory import Lease
from dask_p2p.transports.flow_control import FlowControl
from dask_p2p.transports.reading import Arrived, Failed, Pending, Reading, Region, Request
from dask_p2p.types import Array

__all__ = ["EmptyBlock", "LeasedBlock", "SameHostReading"]


class LeasedBlock(ABC):
    """A block that is read under a lease.

    Parameters
    ----------
    block
        As it is declared.
    lease
        Ended with `close`; None for a block that needs none.
    """

    def __init__(self, block: Request | None, lease: Lease | None) -> None:
        self._block = block
        self._lease = lease

    @property
    def is_open(self) -> bool:
        """Whether the lease has not ended."""
        return self._lease is not None

    @abstractmethod
    def region(self, box: Box) -> Pending:
        """Return a region of it."""

    def confirm(self) -> None:
        """Raise an error if the holder has ended: what is read of it then is nowhere promised."""
        if self._lease is None or self._block is None:
            return
        try:
            lives = self._lease.holder_lives()
        except OSError as exc:
            message = f"cannot find out whether {self._block.holder} is alive: {exc}"
            raise TransferError(message) from exc
        if not lives:
            raise BlockUnavailableError(f"{self._block.holder} ended while {self._block} was read")

    def close(self) -> None:
        """End the lease. Idempotent."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None


class EmptyBlock(LeasedBlock):
    """A block without elements: it has no address, and needs no lease."""

    def __init__(self, array: Array) -> None:
        super().__init__(None, None)
        self._array = array

    def region(self, box: Box) -> Pending:
        return Arrived(self._array[box_slices(box)])


class SameHostReading(Reading):
    """Blocks that are leased one after another, each when its first part is wanted.

    Parameters
    ----------
    requests, flow
        See `Reading`.
    lease
        Opens the first of some blocks; the holder may be asked for the others in the same call.
    is_tapered
        See `Reading.parts`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        flow: FlowControl,
        lease: Callable[[Sequence[Request]], LeasedBlock],
        is_tapered: bool,
    ) -> None:
        super().__init__(requests, flow)
        self._lease = lease
        self._is_tapered = is_tapered
        self._opened: dict[int, LeasedBlock] = {}

    def __iter__(self) -> Iterator[Region]:
        for part in self.parts(is_tapered=self._is_tapered):
            try:
                block = self._block(part.request)
            except (TransferError, BlockMismatchError) as exc:
                self.drop(part.request)
                yield Region(part, Failed(exc))
            else:
                yield Region(part, block.region(part.box))

    def _block(self, number: int) -> LeasedBlock:
        block = self._opened.get(number)
        if block is None:
            block = self._opened[number] = self._lease(self.requests[number:])
        return block

    def confirm(self) -> None:
        for block in self._opened.values():
            block.confirm()

    def close(self) -> None:
        with ExitStack() as leases:  # each, whatever becomes of the others
            for block in self._opened.values():
                leases.callback(block.close)
