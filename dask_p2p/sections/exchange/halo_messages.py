"""Halo exchange in host memory, by packed messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from dask_p2p.geometry import Box, Layout, box_shape, box_slices
from dask_p2p.sections.exchange.movers import ExchangeCall, HaloMover
from dask_p2p.sections.exchange.staged import begin_in_order
from dask_p2p.sections.wire.connection import Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array

_LARGE_BYTES = 1 << 16  # size of a message between hosts that a socket may not accept in one call
# Least elements of a local block for overlap. Overlap calls the function for three or more parts.
# These calls took 0.02 ms a step more for a five-point stencil in NumPy: a quarter of the step at
# 128 x 128, nothing measurable from 512 x 512 on. Overlap hides the network, so it is useless
# between ranks of one host.
_LEAST_OVERLAPPED = 1 << 18


class Packed:
    """Packed regions of an array: one after the other in one buffer."""

    def __init__(
        self,
        boxes: Sequence[Box],  # the regions, in indices of the array
        whole: Array,  # one-dimensional buffer for all regions
    ) -> None:
        self.whole = whole
        regions: list[Array] = Layout(map(box_shape, boxes)).views(whole, whole.dtype)
        self.regions = [*zip(map(box_slices, boxes), regions, strict=True)]

    def pack(self, array: Array) -> None:
        """Copy the regions of an array into the buffer."""
        for index, region in self.regions:
            region[...] = array[index]

    def unpack(self, array: Array) -> None:
        """Copy the buffer into the regions of an array."""
        for index, region in self.regions:
            array[index] = region


class HaloMessages(HaloMover):
    """Exchanges halos in host memory, in one packed message a neighbour."""

    def __init__(self, call: ExchangeCall, connections: Connections) -> None:
        self._call, self._connections = call, connections
        receives, sends = (
            {r: Packed(boxes, np.empty(elements_of(boxes), call.dtype)) for r, boxes in of.items()}
            for of in (call.exchange.receives, call.exchange.sends)
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
        data: Array,  # the local block with its halo
        in_background: bool,  # whether the caller computes: large messages need a thread
    ) -> Callable[[], Any] | None:
        """Begin an exchange; return a function that completes it and unpacks the halo."""
        connections, order, text = self._connections, self._call.order, self._call.text
        if connections.is_alone:
            return None
        for packed in self._outgoing:
            packed.pack(data)
        in_background = in_background and self._is_large
        end = begin_in_order(connections, order, text, self._sends, self._receives, in_background)

        def unpacked() -> None:
            end()
            for packed in self._incoming:
                packed.unpack(data)

        return unpacked

    def is_worth_hiding(self, elements: int) -> bool:
        """Return whether a local block of this size should be computed during the exchange."""
        is_on_other_host = self._connections.is_on_other_host
        return elements >= _LEAST_OVERLAPPED and any(map(is_on_other_host, self._receives))


def elements_of(boxes: Sequence[Box]) -> int:
    """Count the elements in boxes."""
    return sum(prod(box_shape(box)) for box in boxes)


def _bytes_of(packed: Packed) -> memoryview:
    whole: Any = packed.whole.view("u1")
    return memoryview(whole)
