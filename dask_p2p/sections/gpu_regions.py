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

A share may be made in `Pieces`, one after the other, with an event behind each: others read the
first while the next is made.

Nobody waits at the end for the others to say what they read, but who does something with the share
or in its memory: see `GpuRegions.settle`. Meanwhile the host puts more work on the stream.

What cannot be read is sent: see `gpu_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dask_p2p.backends import RUN_BYTES, order_of
from dask_p2p.geometry import Box, Runs, box_slices, gapless_from, split_box, taper_last
from dask_p2p.interprocess import cuda_ipc
from dask_p2p.sections.gpu_messages import GpuMessages
from dask_p2p.sections.gpu_places import mapped, told
from dask_p2p.sections.link import Buffer
from dask_p2p.sections.links import Links
from dask_p2p.sections.pieces import MOST_PIECES, Pieces, along
from dask_p2p.sections.regions import Call, Local
from dask_p2p.sections.windows import OwnEvents, PeerMemory, if_possible, opened
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.devices import Gpu

#: What is read last is no larger. A kernel puts it into place in 50 µs: the host needs as long for
#: one more part.
_LAST_PART_BYTES = 2**26
#: What is larger does not stay until later: memory may be short, and the host is ahead anyway.
_MOST_UNSETTLED_BYTES = 2**30
_READ, _WRITTEN = range(2)  # events of a member; from the second on one for each piece


_Region: TypeAlias = Sequence[tuple[int, Array]]  # of pieces, each with its number


class _Unsettled(NamedTuple):
    """What others may still read."""

    call: Call
    axis: int  # of pieces
    made: list[Array]  # these
    regions: Mapping[int, _Region]  # of these, by the rank of those to whom they belong
    targets: dict[int, Array]  # what has not been read here, and must come otherwise
    said: Callable[[], Mapping[int, Buffer]]  # waits for what others say: whether they read


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
        self._messages = GpuMessages(gpu, links, reads_memory)
        self._own: OwnEvents | None = None
        self._near: dict[int, PeerMemory] | None = None  # by rank, from the first exchange on
        self._unsettled: _Unsettled | None = None

    def bring(
        self,
        call: Call,
        share: Array | Pieces,
        boxes: Mapping[int, Box],
        targets: Mapping[int, Array],
        local: Local | None = None,
    ) -> None:
        """Do what `Regions.bring` does, on the member's stream.

        Others may still read the share: it must stay as it is until `settle` has returned.
        """
        self.settle()
        pieces = share if isinstance(share, Pieces) else Pieces.one(share)
        made: list[Array] = []
        try:
            self._unsettled = self._bring_directly(call, pieces, made, boxes, targets, local)
        except BaseException:
            self._gpu.exported.append(made)  # others may still be reading
            raise
        is_large = sum(each.nbytes for each in made) > _MOST_UNSETTLED_BYTES
        if self._unsettled is not None and (is_large or self._unsettled.targets):
            self.settle()

    def settle(self) -> None:
        """Have the stream wait for those that read the last share, and send what they did not."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or self._links is None:
            return
        call, axis, made, regions, targets, said = unsettled
        try:
            readers = {rank for rank, has_read in said().items() if any(has_read)}
        except BaseException:
            self._gpu.exported.append(made)
            raise
        for rank in readers:
            self._open(self._links, call)[rank].wait(self._gpu.stream, _READ)
        unread = {
            rank: [piece for _, piece in region]
            for rank, region in regions.items()
            if rank not in readers
        }
        self._messages.bring(call, axis, unread, targets)

    def _bring_directly(
        self,
        call: Call,
        pieces: Pieces,
        made: list[Array],
        boxes: Mapping[int, Box],
        targets: Mapping[int, Array],
        local: Local | None,
    ) -> _Unsettled | None:
        """Make a share and read from others, as far as that is possible; return what is left."""
        gpu, links = self._gpu, self._links
        near = {} if links is None else self._open(links, call)
        written = []
        with gpu.queue.within(gpu.stream):
            for number in range(len(pieces.bounds) - 1):
                made.append(pieces.make(number))
                written.append(self._record(_WRITTEN + number))
            regions = {
                rank: [(n, made[n][box_slices(part)]) for n, part, _ in pieces.of(box)]
                for rank, box in boxes.items()
            }
            if links is not None:
                told = {rank: self._places(pieces.axis, regions.get(rank, ())) for rank in near}
                text = f"{call.text}, {call.order}, places"
                said = links.begin(text, told, dict.fromkeys(near))
            if local is not None:
                self._place_own(call, pieces, made, written, local)
            if links is None:
                return None
            places = said()
            with gpu.reading:
                gpu.check_goes_on()
                read = self._read(links, call, places, targets)
        unread = {rank: target for rank, target in targets.items() if rank not in read}
        told_read = self._tell_read(links, call, read)
        return _Unsettled(call, pieces.axis, made, regions, unread, told_read)

    def _place_own(
        self,
        call: Call,
        pieces: Pieces,
        made: Sequence[Array],
        written: Sequence[Any],  # an event behind each piece
        local: Local,
    ) -> None:
        """Put on the queue what of each piece stays here."""
        queue = self._gpu.queue
        for number, part, inside in pieces.of(local.box):
            queue.concurrent.wait_event(written[number])
            place = box_slices(tuple(inside[axis] for axis in call.axes))
            source = made[number][box_slices(part)]
            queue.permute(local.target[place], source, call.axes, concurrent=True)

    def _record(self, number: int) -> Any:
        """Record an event behind what the stream was given; return it."""
        if self._own is None:  # nobody else waits
            return self._gpu.stream.record()
        return self._gpu.stream.record(self._own.events[number])

    def _read(
        self, links: Links, call: Call, said: Mapping[int, Buffer], targets: Mapping[int, Array]
    ) -> set[int]:
        """Put reads of regions that others named on the queue; return whose these are."""
        gpu, near, found = self._gpu, self._open(links, call), {}
        for rank in call.in_turn(links, [rank for rank, place in said.items() if len(place)]):
            region = if_possible(gpu, partial(mapped, near[rank], said[rank], call.dtype))
            if region is not None:
                found[rank] = region
        for turn, (rank, (its_axis, pieces)) in enumerate(found.items(), 1):
            start = 0
            for number, piece in pieces:
                for stream in gpu.queue.reading:
                    near[rank].wait(stream, _WRITTEN + number)
                is_last = turn == len(found) and number == pieces[-1][0]
                self._read_piece(call, its_axis, start, piece, targets[rank], is_last)
                start += piece.shape[its_axis] if piece.ndim else 0
            links.count(rank, targets[rank].nbytes)
        return {*found}

    def _read_piece(
        self, call: Call, axis: int, start: int, piece: Array, target: Array, is_last: bool
    ) -> None:
        """Put a piece of another member's region, which begins there along the axis, into place."""
        queue = self._gpu.queue
        part_bytes = self._gpu.part_bytes
        given = piece.shape, piece.strides, piece.itemsize, call.axes
        for part in _parts(*given, part_bytes, is_last):
            copy = queue.prefetch(piece[box_slices(part)], part_bytes)
            moved = part
            if part:
                low, high = part[axis]
                moved = along(axis, part, (start + low, start + high))
            place = box_slices(tuple(moved[each] for each in call.axes))
            queue.permute_prefetched(target[place], copy, call.axes)

    def _places(self, axis: int, region: _Region) -> bytes:
        """Return where a region lies, for the member that reads it; nothing if that cannot.

        Members may have their shares in pieces along other axes, or in one.
        """
        found = []
        for number, piece in region:
            place = if_possible(self._gpu, partial(cuda_ipc.export, piece))
            if place is None:
                return b""
            found.append((number, piece.shape, piece.strides, place))
        return told(axis, tuple(found)) if found else b""

    def _tell_read(
        self, links: Links, call: Call, read: set[int]
    ) -> Callable[[], Mapping[int, Buffer]]:
        """Tell others whether they were read; return what waits for what they say."""
        self._record(_READ)
        near = self._open(links, call)
        told = {rank: bytes([rank in read]) for rank in near}
        into: dict[int, Buffer | None] = {rank: bytearray(1) for rank in near}
        return links.begin(f"{call.text}, read", told, into)

    def _open(self, links: Links, call: Call) -> dict[int, PeerMemory]:
        """Find out, once, which members of the host read each other's memory."""
        if self._near is None:
            gpu, (own_rank, size) = self._gpu, links.place
            ranks = [each for each in range(size) if each != own_rank]
            near = [each for each in ranks if gpu.has_windows and not links.is_on_other_host(each)]
            own = (
                if_possible(gpu, partial(OwnEvents, gpu, _WRITTEN + MOST_PIECES)) if near else None
            )
            told = {rank: b"" if own is None else own.told(rank) for rank in near}
            self._near = opened(
                gpu, links, call.text, told, lambda rank, said: PeerMemory(gpu, said)
            )
            self._own = own
            self._messages.prepare()
        return self._near


@lru_cache(maxsize=256)  # a member reads the same regions again and again
def _parts(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    axes: Sequence[int],
    part_bytes: int,
    is_last: bool,
) -> tuple[Box, ...]:
    """Cut a region; what is read last is smaller and smaller, as nothing comes beside it."""
    whole = tuple((0, length) for length in shape)
    if not part_bytes or not whole:
        return (whole,)
    order = order_of(strides)
    lies, steps = ([of[axis] for axis in order] for of in (shape, strides))
    others_from = gapless_from(lies, steps, item_bytes)
    runs = Runs(order.index(axes[-1]), RUN_BYTES // item_bytes, others_from)
    in_memory = tuple(whole[axis] for axis in order)
    parts = split_box(in_memory, max(1, part_bytes // item_bytes), runs)
    if is_last:
        parts = taper_last(parts, max(1, _LAST_PART_BYTES // item_bytes), runs)
    return tuple(tuple(part[order.index(axis)] for axis in range(len(shape))) for part in parts)
