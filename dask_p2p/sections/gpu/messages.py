"""Regions in GPU memory that other ranks cannot read: sent in messages.

Between hosts they go by UCX, each from contiguous GPU memory, if the connection carries messages of
that size. All others go through host memory: to other hosts without UCX, between ranks of one
process, and where the allocator's memory cannot be shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.geometry import box_slices, whole_box
from dask_p2p.sections.exchange.movers import ExchangeCall
from dask_p2p.sections.exchange.pieces import along
from dask_p2p.sections.exchange.regions import RegionExchange
from dask_p2p.sections.exchange.staged import begin_in_order
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams


class GpuMessages:
    """Exchanges regions in messages, repeatedly.

    Parameters
    ----------
    gpu
        The rank's GPU.
    connections, reads_memory
        As for `RegionExchange`.
    """

    def __init__(self, gpu: GpuStreams, connections: Connections, reads_memory: bool) -> None:
        self._gpu, self._connections = gpu, connections
        self._of_host = RegionExchange(connections, reads_memory)

    def prepare(self) -> None:
        """Prepare exchanges, as `RegionExchange.prepare` does."""
        self._of_host.prepare()

    def bring(
        self,
        call: ExchangeCall,
        axis: int,  # axis along which regions are in pieces
        regions: dict[int, list[Array]],  # by rank of the receiver: the pieces
        targets: dict[int, Array],  # by rank of the sender
    ) -> None:
        """Send regions to other ranks, and receive theirs into `targets`."""
        if self._connections.use_ucx and (regions or targets):
            self._by_ucx(call, axis, regions, targets)
        if regions or targets:
            self._through_host(call, axis, regions, targets)

    def _by_ucx(
        self,
        call: ExchangeCall,
        axis: int,
        regions: dict[int, list[Array]],
        targets: dict[int, Array],
    ) -> None:
        """Exchange regions by UCX from GPU memory, and remove these from the arguments."""
        gpu, connections, sends, receives = self._gpu, self._connections, {}, {}
        with gpu.queue.within(gpu.stream):
            for rank, pieces in [*regions.items()]:
                if connections.carries(rank, sum(piece.nbytes for piece in pieces)):
                    sends[rank] = self._in_one_piece(regions.pop(rank), axis)
            for rank, target in targets.items():
                if connections.carries(rank, target.nbytes):
                    receives[rank] = gpu.empty(call.exchange.shape_before(target.shape), call.dtype)
        gpu.wait()  # for these copies, and for earlier uses of this memory
        end = begin_in_order(
            connections,
            call.order,
            f"{call.text}, by UCX",
            {rank: _bytes_of(each) for rank, each in sends.items()},
            {rank: _bytes_of(each) for rank, each in receives.items()},
        )
        end()
        with gpu.queue.within(gpu.stream):
            for rank, arrived in receives.items():
                gpu.queue.permute(targets.pop(rank), arrived, call.exchange.axes)

    def _in_one_piece(self, pieces: Sequence[Array], axis: int) -> Array:
        """Return contiguous memory for a region, and enqueue the copies of its pieces into it."""
        shape = list(pieces[0].shape)
        if shape:
            shape[axis] = sum(piece.shape[axis] for piece in pieces)
        whole, start = self._gpu.empty(shape, pieces[0].dtype), 0
        for piece in pieces:
            box = whole_box(piece.shape)
            if box:
                box = along(axis, box, (start, start + piece.shape[axis]))
                start += piece.shape[axis]
            self._gpu.queue.permute(whole[box_slices(box)], piece, range(piece.ndim))
        return whole

    def _through_host(
        self,
        call: ExchangeCall,
        axis: int,
        regions: Mapping[int, Sequence[Array]],
        targets: Mapping[int, Array],
    ) -> None:
        """Copy regions to host memory, exchange them there, and copy received regions back up."""
        gpu = self._gpu
        axes = tuple(range(len(call.exchange.axes)))
        straight = replace(call, exchange=replace(call.exchange, axes=axes))
        down = {rank: _joined([*map(gpu.to_host, each)], axis) for rank, each in regions.items()}
        up = {
            rank: np.empty(call.exchange.shape_before(target.shape), call.dtype)
            for rank, target in targets.items()
        }
        self._of_host.give(straight, down, up)
        arrived = {rank: gpu.module.asarray(each) for rank, each in up.items()}
        with gpu.queue.within(gpu.stream):
            for rank, each in arrived.items():
                gpu.queue.permute(targets[rank], each, call.exchange.axes)


def _bytes_of(whole: Array) -> Array:
    flat: Array = whole.reshape(-1).view(np.uint8)
    return flat


def _joined(pieces: Sequence[Any], axis: int) -> Any:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)
