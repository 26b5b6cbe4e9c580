"""Interfaces of the objects that move data between ranks, one for each kind of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dask_p2p.geometry import Box
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.exchange.regions import LocalRegion, RegionCall


class HaloMover(ABC):
    """Exchanges packed halos with other ranks, repeatedly."""

    @abstractmethod
    def begin(
        self,
        data: Array,  # the local block with its halo
        in_background: bool,  # whether the caller computes during the exchange
    ) -> Callable[[], Any] | None:
        """Begin an exchange; return a function that completes it, or None if it is complete."""

    @abstractmethod
    def is_worth_hiding(self, elements: int) -> bool:
        """Return whether a local block of this size should be computed during the exchange."""

    def can_put(self) -> bool:
        """Return whether `put` can be used, after the first exchange, and prepare it."""
        return False

    def put(self, data: Array) -> None:
        """Enqueue a whole exchange on the GPU's stream, without any work of the host."""
        raise NotImplementedError


class RegionMover(ABC):
    """Exchanges regions of local blocks with other ranks, repeatedly."""

    @abstractmethod
    def bring(
        self,
        call: RegionCall,
        local_block: Any,  # this rank's local block; on a GPU it may be `Pieces`
        boxes: Mapping[int, Box],  # by receiver: box of the local block
        targets: Mapping[int, Array],  # by sender: destination of its region
        local: LocalRegion | None = None,  # the region that stays on this rank
    ) -> None:
        """Exchange regions; the local block must not change until `settle`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no rank reads the local blocks of previous exchanges."""
