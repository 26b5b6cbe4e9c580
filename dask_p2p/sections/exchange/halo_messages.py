"""Halo exchange in host memory, by packed messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.sections.exchange.movers import ExchangeCall, HaloMover
from dask_p2p.sections.exchange.packed import Packed, receive_layouts, send_layouts, text_of
from dask_p2p.sections.exchange.staged import begin_in_order
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array

_LARGE_BYTES = 1 << 16  # size of a message between hosts that a socket may not accept in one call


class HaloMessages(HaloMover):
    """Exchanges halos in host memory, in one packed message a neighbour."""

    def __init__(self, calls: Sequence[ExchangeCall], connections: Connections) -> None:
        self._connections = connections
        self._text, self._order = text_of(calls), calls[0].order
        sends, receives = (
            {r: Packed(layout, np.empty(layout.size_bytes, np.uint8)) for r, layout in of.items()}
            for of in (send_layouts(calls), receive_layouts(calls))
        )
        self._receives: dict[int, Buffer | None] = {
            rank: _bytes_of(packed) for rank, packed in receives.items()
        }
        self._sends = {rank: _bytes_of(packed) for rank, packed in sends.items()}
        self._outgoing, self._incoming = list(sends.values()), list(receives.values())
        buffers = [*map(_bytes_of, self._outgoing), *map(_bytes_of, self._incoming)]
        self._is_large = any(len(each) > _LARGE_BYTES for each in buffers)

    def begin(
        self,
        arrays: Sequence[Array],  # local blocks with their halos
        in_background: bool,  # whether the caller computes: large messages need a thread
    ) -> Callable[[], Any] | None:
        """Begin an exchange; return a function that completes it and unpacks the halos."""
        connections = self._connections
        if connections.is_alone:
            return None
        for packed in self._outgoing:
            packed.pack(arrays)
        in_background = in_background and self._is_large
        order, text = self._order, self._text
        end = begin_in_order(connections, order, text, self._sends, self._receives, in_background)

        def unpacked() -> None:
            end()
            for packed in self._incoming:
                packed.unpack(arrays)

        return unpacked

    def is_worth_hiding(self, elements: int, in_graph: bool) -> bool:
        """Return whether local blocks of this size should be computed during the exchange."""
        is_on_other_host = self._connections.is_on_other_host
        is_large = elements >= tuning.current.overlap_elements and not in_graph
        return is_large and any(map(is_on_other_host, self._receives))


def _bytes_of(packed: Packed) -> memoryview:
    whole: Any = packed.whole
    return memoryview(whole)
