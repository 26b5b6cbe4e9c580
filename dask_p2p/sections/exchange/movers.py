"""Exchanges as collective calls, and the interfaces of the objects that move their data.

Halos have movers of their own. A function may write to its local block while a halo is in flight,
so each halo array keeps memory for packed halos, which is prepared once. Regions of a
redistribution are larger. They are read or sent in place where possible, and all redistributions
share the memory for packing. In host memory, a halo moved as such regions took 5 to 20 µs for each
neighbour, in place of 1 µs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.plans.exchange import Exchange
from dask_p2p.plans.orders import partners
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array, DType


@dataclass(frozen=True)
class ExchangeCall:
    """An exchange between local blocks, a collective call of all ranks."""

    text: str  # text of the call, the same on all ranks
    dtype: DType  # data type of the local blocks
    exchange: Exchange  # this rank's part
    order: str = "auto"  # schedule of the messages: one of `dask_p2p.plans.orders.ORDERS`
    #: Mean number of elements from one rank to another. 0 for halos: they always use messages.
    mean_elements: int = 0
    #: Upper bound of the number of elements from one rank to another, the same on all ranks. 0 if
    #: it is unknown.
    most_elements: int = 0

    def in_turn(self, connections: Connections, sources: Collection[int]) -> list[int]:
        """Return the ranks that this one reads from, in the order of reading."""
        order = "diagonal" if self.order == "auto" else self.order
        in_turn = (stage.source for stage in partners(order, *connections.rank_and_size))
        return [rank for rank in in_turn if rank is not None and rank in sources]


class HaloMover(ABC):
    """Exchanges packed halos with other ranks, repeatedly: of one local block, or of several."""

    count = 0  # number of exchanges so far, if the mover needs it

    @abstractmethod
    def begin(
        self,
        arrays: Sequence[Array],  # local blocks with their halos
        in_background: bool,  # whether the caller computes during the exchange
    ) -> Callable[[], Any] | None:
        """Begin an exchange; return a function that completes it, or None if it is complete."""

    @abstractmethod
    def is_worth_hiding(self, elements: int, in_graph: bool) -> bool:
        """Return whether local blocks of this size should be computed during the exchange.

        `in_graph` is true for exchanges of a CUDA graph, by `put`.
        """

    def can_put(self) -> bool:
        """Return whether `put` can be used, after the first exchange, and prepare it."""
        return False

    def put(self, arrays: Sequence[Array]) -> None:
        """Enqueue a whole exchange on the GPU's stream, without any work of the host."""
        raise NotImplementedError


class RegionMover(ABC):
    """Moves regions of local blocks to other ranks, in exchanges with one box a rank."""

    @abstractmethod
    def bring(
        self,
        call: ExchangeCall,
        source: Any,  # this rank's local block; on a GPU it may be `Pieces`
        target: Array,  # its local block afterwards
    ) -> None:
        """Exchange regions; the source must not change until `settle`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no rank reads the local blocks of previous exchanges."""
