"""Regions of shares in memory of GPUs: read by the members of a host where they lie.

A member records an event behind what has written its share, and tells others where their regions
are. These read them part by part, as tasks do: a copy engine brings the next part while a kernel
puts the one before into place. Then each records an event behind that, tells so, and the streams of
those that were read wait for it before they go on. The host waits for messages alone::

    stream      [what writes the share] written          [waits: others have read] [what overwrites]
    copies                        [waits: others' written][part][part][part]
    emptying                                                    [part][part][part] read

All members of a host that read each other tell each other both, in each exchange, also where they
give each other nothing. So no event is recorded again before all have waited for it: a member that
tells where its regions are has waited for what was read before, and one that tells what it has read
has waited for what was written.

What cannot be read goes through host memory: to other hosts, between members of one process, and
where the allocator's memory cannot be shared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.geometry import Box, box_slices, split_box, taper_last
from dask_p2p.sections.links import Buffer, Links
from dask_p2p.sections.regions import Call, Local, Regions
from dask_p2p.sections.windows import OwnEvents, PeerMemory, if_possible, opened
from dask_p2p.transports.in_place import cuda_ipc
from dask_p2p.transports.reading import LAST_PART_BYTES
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.devices import Gpu

__all__ = ["GpuRegions"]

_WRITTEN, _READ = range(2)  # events of a member


class GpuRegions:
    """Brings regions again and again. It is what `Regions` is for those in host memory.

    Parameters
    ----------
    gpu
        Of this member.
    links, reads_memory
        As of `Regions`.
    """

    def __init__(self, gpu: Gpu, links: Links | None, reads_memory: bool) -> None:
        self._gpu, self._links = gpu, links
        self._through_host = Regions(links, reads_memory)
        self._own: OwnEvents | None = None
        self._near: dict[int, PeerMemory] | None = None  # by rank, from the first exchange on

    def bring(
        self,
        call: Call,
        regions: Mapping[int, Array],
        targets: Mapping[int, Array],
        local: Local | None = None,
    ) -> None:
        """Do what `Regions.bring` does, on the member's stream."""
        try:
            readers, read = self._bring_directly(call, regions, targets, local)
        except BaseException:
            self._gpu.exported.append(regions)  # others may still be reading
            raise
        if self._links is not None:
            regions = {rank: each for rank, each in regions.items() if rank not in readers}
            targets = {rank: each for rank, each in targets.items() if rank not in read}
            self._bring_through_host(call, regions, targets)

    def _bring_directly(
        self,
        call: Call,
        regions: Mapping[int, Array],
        targets: Mapping[int, Array],
        local: Local | None,
    ) -> tuple[set[int], set[int]]:
        """Read from others; return the members that read here, and those that were read."""
        gpu, links, read = self._gpu, self._links, set[int]()
        with gpu.queue.within(gpu.stream):
            if local is not None:
                gpu.queue.permute(local.target, local.region, call.axes, concurrent=True)
            if links is not None:
                read = self._read(links, call, regions, targets)
        return set() if links is None else self._readers(links, call, read), read

    def _read(
        self,
        links: Links,
        call: Call,
        regions: Mapping[int, Array],
        targets: Mapping[int, Array],
    ) -> set[int]:
        """Put reads of regions on the queue; return whose these are."""
        gpu, near = self._gpu, self._open(links, call)
        if self._own is not None:
            self._own.events[_WRITTEN].record(gpu.stream)
        told = {rank: self._place(regions.get(rank)) for rank in near}
        text = f"{call.text}, {call.order}, places"
        said = links.exchange(text, told, dict.fromkeys(near))
        found = {}
        for rank in call.in_turn(links, [rank for rank, place in said.items() if len(place)]):
            shape = call.shape_before(targets[rank].shape)
            region = if_possible(gpu, partial(_region, near[rank], said[rank], shape, call))
            if region is not None:
                found[rank] = region
        for number, (rank, region) in enumerate(found.items(), 1):
            for stream in gpu.queue.reading:
                near[rank].wait(stream, _WRITTEN)
            target = targets[rank]
            for part in self._parts(region, is_last=number == len(found)):
                place = box_slices(tuple(part[axis] for axis in call.axes))
                copy = gpu.queue.prefetch(region[box_slices(part)], gpu.part_bytes)
                gpu.queue.permute_prefetched(target[place], copy, call.axes)
            links.count(rank, target.nbytes)
        return {*found}

    def _parts(self, region: Array, is_last: bool) -> Iterator[Box]:
        """Cut a region; what is read last is smaller and smaller, as nothing comes beside it."""
        whole = tuple((0, length) for length in region.shape)
        if not self._gpu.part_bytes:
            return iter([whole])
        parts = split_box(whole, max(1, self._gpu.part_bytes // region.itemsize))
        return taper_last(parts, max(1, LAST_PART_BYTES // region.itemsize)) if is_last else parts

    def _place(self, region: Array | None) -> bytes:
        """Return where a region lies, for the member that reads it; nothing if that cannot."""
        if region is None:
            return b""
        place = if_possible(self._gpu, partial(cuda_ipc.export, region))
        if place is None:
            return b""
        return json.dumps({"place": asdict(place), "strides": region.strides}).encode()

    def _readers(self, links: Links, call: Call, read: set[int]) -> set[int]:
        """Tell others what was read, and have the stream wait for those that read from here."""
        gpu, near = self._gpu, self._open(links, call)
        if self._own is not None:
            self._own.events[_READ].record(gpu.stream)
        told = {rank: bytes([rank in read]) for rank in near}
        into: dict[int, Buffer | None] = {rank: bytearray(1) for rank in near}
        said = links.exchange(f"{call.text}, read", told, into)
        readers = {rank for rank, has_read in said.items() if any(has_read)}
        for rank in readers:
            near[rank].wait(gpu.stream, _READ)
        return readers

    def _bring_through_host(
        self, call: Call, regions: Mapping[int, Array], targets: Mapping[int, Array]
    ) -> None:
        gpu = self._gpu
        straight = replace(call, axes=tuple(range(len(call.axes))))
        down = {rank: gpu.to_host(region) for rank, region in regions.items()}
        up = {
            rank: np.empty(call.shape_before(target.shape), call.dtype)
            for rank, target in targets.items()
        }
        self._through_host.bring(straight, down, up)
        arrived = {rank: gpu.module.asarray(each) for rank, each in up.items()}
        with gpu.queue.within(gpu.stream):
            for rank, each in arrived.items():
                gpu.queue.permute(targets[rank], each, call.axes)

    def _open(self, links: Links, call: Call) -> dict[int, PeerMemory]:
        """Find out, once, which members of the host read each other's memory."""
        if self._near is None:
            gpu, (own_rank, size) = self._gpu, links.place
            ranks = [each for each in range(size) if each != own_rank]
            near = [each for each in ranks if gpu.has_windows and not links.is_on_other_host(each)]
            own = if_possible(gpu, partial(OwnEvents, gpu, 2)) if near else None
            told = {rank: b"" if own is None else own.told(rank) for rank in near}
            self._near = opened(
                gpu, links, call.text, told, lambda rank, said: PeerMemory(gpu, said)
            )
            self._own = own
        return self._near


def _region(of: PeerMemory, said: Buffer, shape: Sequence[int], call: Call) -> Any:
    """Return another member's region, as it is mapped here."""
    told = json.loads(bytes(said))
    strides, item_bytes = told["strides"], call.dtype.itemsize
    along = zip(shape, strides, strict=True)
    spread_bytes = sum((length - 1) * abs(stride) for length, stride in along) + item_bytes
    address = of.mapped(cuda_ipc.Place(**told["place"]), spread_bytes)
    return cuda_ipc.array_at(address, tuple(shape), tuple(strides), call.dtype)
