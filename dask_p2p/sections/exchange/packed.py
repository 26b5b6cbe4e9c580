"""Packed regions of arrays: one after the other in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from dask_p2p.geometry import Box, Layout, box_shape, box_slices
from dask_p2p.sections.exchange.movers import ExchangeCall
from dask_p2p.types import Array, DType

_MOST_ALIGNMENT_BYTES = 16  # of elements: that of complex numbers on GPUs
_MOST_CHARACTERS = 200  # of the text of a call: longer ones end with a digest


@dataclass(frozen=True)
class PackedLayout:
    """The positions of the regions of one or several arrays in one buffer."""

    boxes: Sequence[Sequence[Box]]  # by array: its regions
    dtypes: Sequence[DType]  # by array

    @cached_property
    def _arrays(self) -> Layout:
        """The arrays' parts of the buffer."""
        sizes = zip(self.boxes, self.dtypes, strict=True)
        parts = [(elements_of(boxes) * dtype.itemsize,) for boxes, dtype in sizes]
        largest = max(dtype.itemsize for dtype in self.dtypes)
        return Layout(parts, alignment=min(1 << (largest - 1).bit_length(), _MOST_ALIGNMENT_BYTES))

    @property
    def size_bytes(self) -> int:
        """Size of the buffer."""
        return self._arrays.size_bytes

    @property
    def starts(self) -> list[int]:
        """Offsets of the arrays' parts, in bytes."""
        return self._arrays.starts

    def regions(self, whole: Array) -> Iterator[tuple[int, Any, Array]]:
        """Yield each region: number of its array, slices in it, and a view of the buffer."""
        for number, (boxes, dtype) in enumerate(zip(self.boxes, self.dtypes, strict=True)):
            part = self._arrays.view(whole, number, np.uint8).view(dtype)
            views = Layout(map(box_shape, boxes)).views(part, dtype)
            for box, view in zip(boxes, views, strict=True):
                yield number, box_slices(box), view


class Packed:
    """A buffer with packed regions."""

    def __init__(
        self,
        layout: PackedLayout,  # positions of the regions
        whole: Array,  # one-dimensional buffer of bytes
    ) -> None:
        self.layout, self.whole = layout, whole
        self._regions = [*layout.regions(whole)]

    def pack(self, arrays: Sequence[Array]) -> None:
        """Copy the regions of all arrays into the buffer."""
        for number, index, region in self._regions:
            region[...] = arrays[number][index]

    def unpack(self, arrays: Sequence[Array]) -> None:
        """Copy the buffer into the regions of all arrays."""
        for number, index, region in self._regions:
            arrays[number][index] = region


def elements_of(boxes: Sequence[Box]) -> int:
    """Count the elements in boxes."""
    return sum(prod(box_shape(box)) for box in boxes)


def send_layouts(calls: Sequence[ExchangeCall]) -> dict[int, PackedLayout]:
    """Return the layout of the message to each receiver, with the regions of all calls."""
    return _layouts(calls, [call.exchange.sends for call in calls])


def receive_layouts(calls: Sequence[ExchangeCall]) -> dict[int, PackedLayout]:
    """Return the layout of the message from each sender, with the regions of all calls."""
    return _layouts(calls, [call.exchange.receives for call in calls])


def _layouts(
    calls: Sequence[ExchangeCall], boxes: Sequence[Mapping[int, Sequence[Box]]]
) -> dict[int, PackedLayout]:
    dtypes = [call.dtype for call in calls]
    ranks = dict.fromkeys(rank for each in boxes for rank in each)
    return {rank: PackedLayout([each.get(rank, []) for each in boxes], dtypes) for rank in ranks}


def text_of(calls: Sequence[ExchangeCall]) -> str:
    """Return the text of one exchange for all calls, different for different calls."""
    text = "; ".join(call.text for call in calls)
    return text if len(calls) == 1 else shortened(text)


def shortened(text: str) -> str:
    """Return the text of a call, with a digest in the place of its end if it is long."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_MOST_CHARACTERS]}... ({digest})"
