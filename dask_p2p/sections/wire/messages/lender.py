"""Arrays that a rank lends in messages: the interface.

A message of `ctx.send` may have an *offer* in the place of arrays. Its receiver copies the arrays
from the sender's memory and acknowledges. If it cannot, it requests their bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dask_p2p.types import Array


class Lender(ABC):
    """The arrays that a rank lends other ranks, and its copies of their arrays.

    The methods are called while the rank moves messages, from the one thread that moves them.
    """

    @abstractmethod
    def offer(self, rank: int, arrays: Sequence[Array]) -> bytes | None:
        """Return the offer of contiguous arrays for a rank; None if their bytes have to be sent."""

    @abstractmethod
    def bring(self, rank: int, offer: bytes, into: Array | None) -> Sequence[Array] | None:
        """Return copies of the arrays that a rank offers, as bytes; None if they are unreadable.

        The only array is copied into the bytes `into`, if that is given.
        """

    @abstractmethod
    def acknowledgement(self) -> bytes:
        """Return the data of the acknowledgement of the newest copies."""

    @abstractmethod
    def acknowledged(self, rank: int, count: int, acknowledgement: bytes) -> None:
        """Take note that a rank has copied the first arrays that it was offered."""

    @abstractmethod
    def refused(self, rank: int, count: int) -> None:
        """Take note that a rank cannot read the first arrays that it was offered, nor others."""

    @abstractmethod
    def to_host(self, part: Any) -> Any:
        """Return the bytes of an array in host memory, and bytes unchanged."""
