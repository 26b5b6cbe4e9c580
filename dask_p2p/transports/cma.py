"""``cma``: regions of NumPy blocks, read out of another process of this host.

By cross-memory attach (`dask_p2p.transports.process_memory`), as MPI libraries and UCX do between
processes of one host. A descriptor holds a block's address. A reader copies parts of the block that
fit into a processor's cache, and permutes each from there. The holder packs and sends nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from secrets import token_bytes
from typing import Any, ClassVar

import numpy as np

from dask_p2p.config import NOT_IN_AUTO, Options, Section, option, positive_bytes, section
from dask_p2p.errors import BlockUnavailableError, Obstacle, TransferError, UnsuitableError
from dask_p2p.layout import Box, box_shape, box_size
from dask_p2p.transports import process_memory
from dask_p2p.transports.buffers import Buffers, buffer_bytes
from dask_p2p.transports.context import WorkerContext
from dask_p2p.transports.descriptor import Descriptor, Peer
from dask_p2p.transports.directory import Lease
from dask_p2p.transports.flow_control import FlowControl, part_that_fits
from dask_p2p.transports.reading import Pending, Request
from dask_p2p.transports.same_host import SameHostTransport
from dask_p2p.transports.same_host_reading import LeasedBlock, SameHostReading
from dask_p2p.types import Array, DType, Kind

__all__ = ["CmaOptions", "CmaReading", "CmaTransport"]

_TOKEN_BYTES = 16
_LET_READ = (
    "Let workers trace each other: docker run --cap-add=SYS_PTRACE, or no security module that "
    "forbids it"
)
# The kernel takes as long for a run of bytes as for 150 bytes more, and comm four times as long as
# cma for each byte.
_SHORT_RUN_BYTES = 128
_MOST_PART_BYTES = 2**30  # a system call reads 2 GiB at most
_MOST_SHORT_RUNS = 2**14  # below, comm takes longer to ask and to be answered


@section("transports.cma")
@dataclass(frozen=True, slots=True)
class CmaOptions(Section):
    """See p2p-schema.yaml."""

    part_bytes: int = option("part-bytes", positive_bytes)


class CmaTransport(SameHostTransport):
    """NumPy blocks of other processes of this host.

    `Peer.memory` is the address and the value of a random token, both in hex. Who reads the token
    there has found the right process, and may read it.
    """

    name: ClassVar[str] = "cma"
    kind: ClassVar[Kind] = "numpy"
    kinds: ClassVar[tuple[str, ...]] = ("numpy",)
    idle_parts: ClassVar[int] = 2

    # --- flow control ---

    @classmethod
    def rank(cls, kind: Kind, options: Options) -> float:
        # Between processes of one host with two cores and NumPy blocks Dask's own TCP takes twice
        # as long. Where checksums are asked for, cma is not used: it has none.
        return 10 if kind == "numpy" and not options.checksum else NOT_IN_AUTO

    @classmethod
    def flow_control(cls, options: Options, kind: Kind) -> FlowControl:
        """Return parts that are read one at a time: the reader's own thread does it."""
        part_bytes = min(CmaOptions.of(options).part_bytes, _MOST_PART_BYTES)
        most_bytes = max(1, options.staging_limit_bytes // 2)  # the rest is for other hosts' parts
        return FlowControl(part_that_fits(part_bytes, most_bytes), parts_in_flight=0)

    @classmethod
    def beside_bytes(cls, options: Options, kind: Kind) -> int:
        return buffer_bytes(cls.flow_control(options, kind).part_bytes or 0)

    # --- both sides ---

    def __init__(self, host: WorkerContext, options: Options) -> None:
        super().__init__(host, options)
        self.buffers = Buffers("numpy", self.idle_bytes(options, "numpy"))
        self.pools.append(self.buffers)
        self.reading = partial(CmaReading, self.buffers)
        self._token = np.frombuffer(token_bytes(_TOKEN_BYTES), np.uint8)

    def obstacle(self, holder: str, kind: Kind, dtype: DType) -> Obstacle | None:
        if dtype.hasobject:
            return Obstacle("objects", "cma moves bytes, not Python objects")
        if not process_memory.is_there():
            return Obstacle("unsupported", "this system has no cross-memory attach")
        return super().obstacle(holder, kind, dtype)

    def describe_memory(self) -> str:
        process_memory.allow_readers()
        return f"{process_memory.address_of(self._token):x} {self._token.tobytes().hex()}"

    def memory_obstacle(self, local: Peer, remote: Peer) -> Obstacle | None:
        try:
            address, token = remote.memory.split()
            runs = process_memory.runs_of(int(address, 16), (_TOKEN_BYTES,), (1,), 1)
            memory = np.empty(_TOKEN_BYTES, np.uint8)
            found_token = process_memory.read(remote.pid, runs, memory.dtype, memory)
        except (OSError, ValueError, AttributeError, OverflowError) as exc:
            return Obstacle("forbidden", f"its memory may not be read: {exc}", _LET_READ)
        if found_token.tobytes().hex() != token:
            return Obstacle("other-process", "its memory is another process'")
        return None

    def place_of(self, block: Array) -> dict[str, Any]:
        return {"address": process_memory.address_of(block)}


class CmaReading(SameHostReading):
    """Blocks that are copied from another process' memory, part by part."""

    transport: ClassVar[str] = "cma"
    kind: ClassVar[Kind] = "numpy"

    def __init__(self, buffers: Buffers, *args: Any) -> None:
        super().__init__(*args)
        self._buffers = buffers

    def open_leased(self, descriptor: Descriptor, block: Request, lease: Lease) -> LeasedBlock:
        address = descriptor.place.get("address") if isinstance(descriptor.place, dict) else None
        if type(address) is not int or not 0 <= address < 2**64:
            raise TransferError(
                f"cma: the descriptor of {block} has no address: {descriptor.place!r}"
            )
        _check_runs(block, descriptor)
        return _CmaBlock(self.peer.pid, descriptor.strides, address, self._buffers, block, lease)


def _check_runs(block: Request, descriptor: Descriptor) -> None:
    """Refuse a block whose elements, as far as they are wanted, lie too far apart."""
    itemsize = block.dtype.itemsize
    largest = box_shape(max(block.boxes, key=box_size, default=()))
    run_bytes = process_memory.run_bytes_of(largest, descriptor.strides, itemsize)
    nbytes = sum(map(box_size, block.boxes)) * itemsize
    if run_bytes < _SHORT_RUN_BYTES and nbytes > _MOST_SHORT_RUNS * run_bytes:
        raise UnsuitableError(
            f"cma: what is wanted of {block} lies in memory in runs of {run_bytes} bytes"
        )


class _CmaBlock(LeasedBlock):
    def __init__(
        self,
        pid: int,
        strides: tuple[int, ...],
        address: int,
        buffers: Buffers,
        block: Request,
        lease: Lease,
    ) -> None:
        super().__init__(block, lease)
        self._pid = pid
        self._strides = strides
        self._address = address
        self._unread = sum(map(box_size, block.boxes))  # elements
        self._buffers = buffers

    def region(self, box: Box) -> Pending:
        return _Region(self._read, box)

    def _read(self, box: Box) -> Any:
        region = self._copied(box)
        self._unread -= box_size(box)
        if not self._unread:
            # All that is wanted is here: the holder need not keep its block any longer.
            self.confirm()
            self.close()
        return region

    def _copied(self, box: Box) -> Any:
        block = self.block
        shape, dtype = box_shape(box), block.dtype
        if 0 in shape:
            return np.empty(shape, dtype)
        if not self.is_open:
            raise TransferError(f"cma: {block} was closed before it was read")
        start_bytes = sum(first * s for (first, _), s in zip(box, self._strides, strict=True))
        try:
            runs = process_memory.runs_of(
                self._address + start_bytes, shape, self._strides, dtype.itemsize
            )
            memory = self._buffers.take((prod(runs.shape) * dtype.itemsize,), np.uint8)
            region = process_memory.read(self._pid, runs, dtype, memory)
        except (OSError, OverflowError) as exc:  # the latter for places outside of any memory
            self.confirm()
            if getattr(exc, "errno", None) == errno.ESRCH:
                message = f"{block.holder} ended while {block} was read"
                raise BlockUnavailableError(message) from exc
            raise TransferError(f"cma: {block} cannot be read: {exc}") from exc
        return np.broadcast_to(region, shape)


@dataclass(frozen=True, slots=True)
class _Region:
    """A region that is read by the thread that waits for it, when it waits."""

    read: Callable[[Box], Any]
    box: Box

    def done(self) -> bool:
        """Return True: nobody else has to do anything for it."""
        return True

    def result(self, timeout_s: float | None = None, /) -> Any:
        """Return the array."""
        return self.read(self.box)
