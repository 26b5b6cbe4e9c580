"""Exchanges in stages, with one partner at a time, in a given order of messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask_p2p.inputs import checked_choice
from dask_p2p.plans.orders import ORDERS, partners
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections


def checked_order(exchange: Any) -> str:
    """Return an order of messages. Raises `InputError` if it does not exist."""
    return checked_choice("exchange", exchange, ORDERS)


def begin_in_order(
    connections: Connections,  # connections of this rank
    order: str,  # one of `ORDERS`
    call: str,  # see `Connections.begin`
    sends: Mapping[int, Buffer],
    receives: Mapping[int, Buffer | None],
    in_background: bool = False,
) -> Callable[[], Any]:
    """Begin an exchange like `Connections.begin`. All stages but the last complete in this call."""
    if order == "auto":
        return connections.begin(call, sends, receives, in_background)
    end: Callable[[], Any] = dict
    for to, source in partners(order, *connections.rank_and_size):
        end = connections.begin(
            f"{call}, {order}",
            {rank: data for rank, data in sends.items() if rank == to},
            {rank: into for rank, into in receives.items() if rank == source},
            in_background,
        )
    return end
