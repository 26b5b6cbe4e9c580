"""Rims on their way to other members: packed, one after the other, and sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dask_p2p.geometry import Box, box_shape, box_slices
from dask_p2p.plans.rims import Rims
from dask_p2p.sections.link import Buffer
from dask_p2p.sections.links import Links
from dask_p2p.sections.staged import begin_in_order
from dask_p2p.types import Array, DType

_LARGE_BYTES = 1 << 16  # of rims for one member: between hosts sockets may take less at once
# Elements of a share. The function is called for three parts or more, which took 0.02 ms a step
# longer of a five-point stencil in NumPy: a quarter at 128 x 128, nothing that could be seen from
# 512 x 512 on. What it hides is the network; between members of one host there is nothing to hide.
_LEAST_OVERLAPPED = 1 << 18


class Packed:
    """Regions of an array, one after the other."""

    def __init__(
        self,
        boxes: Sequence[Box],  # where they are in the array
        whole: Array,  # one-dimensional memory for all of them
    ) -> None:
        self.whole = whole
        self.regions: list[tuple[Any, Array]] = []
        start = 0
        for box in boxes:
            shape = box_shape(box)
            stop = start + prod(shape)
            self.regions.append((box_slices(box), whole[start:stop].reshape(shape)))
            start = stop

    def pack(self, array: Array) -> None:
        """Copy the regions of an array into this memory."""
        for place, region in self.regions:
            region[...] = array[place]

    def unpack(self, array: Array) -> None:
        """Copy what is in this memory to the regions of an array."""
        for place, region in self.regions:
            array[place] = region


@dataclass(frozen=True)
class RimCall:
    """What all members exchange at the same time."""

    rims: Rims  # of this member's share
    dtype: DType
    text: str  # what is exchanged: all members must name the same
    links: Links | None  # by which members exchange; None if this is the only one
    order: str = "auto"  # of messages: one of `dask_p2p.plans.orders.ORDERS`


class RimMessages:
    """Brings rims in host memory: they are sent as they are packed."""

    def __init__(self, call: RimCall) -> None:
        self._call = call
        receives, sends = (
            {r: Packed(boxes, np.empty(elements_of(boxes), call.dtype)) for r, boxes in of.items()}
            for of in (call.rims.receives, call.rims.sends)
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
        data: Array,  # the share with its rims
        beside: bool,  # whether the caller has something else to do: large rims need a thread then
    ) -> Callable[[], Any] | None:
        """Begin an exchange; return what waits for its end, and puts rims into their places."""
        links, order, text = self._call.links, self._call.order, self._call.text
        if links is None:
            return None
        for packed in self._outgoing:
            packed.pack(data)
        beside = beside and self._is_large
        end = begin_in_order(links, order, text, self._sends, self._receives, beside)

        def unpacked() -> None:
            end()
            for packed in self._incoming:
                packed.unpack(data)

        return unpacked

    def is_worth_hiding(self, elements: int) -> bool:
        """Return whether a member that has so many should compute meanwhile, part by part."""
        links = self._call.links
        if links is None or elements < _LEAST_OVERLAPPED:
            return False
        return any(map(links.is_on_other_host, self._receives))


def elements_of(boxes: Sequence[Box]) -> int:
    """Count the elements in boxes."""
    return sum(prod(box_shape(box)) for box in boxes)


def _bytes_of(packed: Packed) -> memoryview:
    whole: Any = packed.whole.view("u1")
    return memoryview(whole)
