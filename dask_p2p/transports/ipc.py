"""``ipc``: regions read in place, between GPUs of one host, through CUDA IPC.

A holder describes a block on its notice board (`dask_p2p.transports.board`): the handle of the
allocation that the block lies in, and its place there. A reader takes a lease on it, maps the
allocation into its own process (once: mappings are kept) and hands out arrays that lie in the
holder's memory. The reader's queue fetches them over NVLink or PCIe, part by part.

Descriptors need not be asked for: a worker that runs an assembling task posts its own blocks
first, since the others are about to read them. Who finds no descriptor asks the holder to post.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dask_p2p.config import Options
from dask_p2p.errors import BlockUnavailableError, P2PError, TransferError
from dask_p2p.kernels import kernel_for
from dask_p2p.layout import Box, box_slices
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports.base import (
    MEET_S,
    Arrived,
    BlockSpec,
    Handler,
    Host,
    Pending,
    RemoteBlock,
    Transport,
    ask,
    check_reply,
    dtype_text,
    find_block,
    mismatch,
    refuse,
)
from dask_p2p.transports.board import Board, Intent, Lease, is_tended, take
from dask_p2p.transports.pacing import Pacing, ipc_pacing
from dask_p2p.transports.requests import checked_key, checked_shape, no_more

__all__ = ["IpcTransport"]

logger = logging.getLogger(__name__)

_PEER_OP = "p2p_ipc_peer"
_POST_OP = "p2p_ipc_post"
_SWEEP_S = 0.1
_CLOSE_S = 5.0  # how long closing waits for readers
_POLL_S = 20e-6


@dataclass(frozen=True, slots=True)
class _Peer:
    """Where a worker runs: what decides whether its memory can be mapped."""

    boot_id: str
    pid_namespace: str
    user: int
    pid: int
    folder: str  # of its board
    gpu: str  # UUID, in hex; empty without a GPU


class IpcTransport(Transport):
    """Blocks of other processes of this host, mapped by CUDA IPC."""

    name: ClassVar[str] = "ipc"
    in_place: ClassVar[bool] = True

    def __init__(self, host: Host, options: Options) -> None:
        super().__init__(host, options)
        self._board = Board(host.folder)
        self._mappings = cuda_ipc.Mappings()
        self._peers: dict[str, tuple[_Peer, str | None]] = {}  # by holder, with the obstacle
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    # --- the reader's side, in task threads ---

    def obstacle(self, holder: str, kind: str, dtype: Any) -> str | None:
        if kind != "cupy":
            return f"ipc moves CuPy blocks, not {kind}"
        try:
            return self._known(holder)[1]
        except TransferError as exc:
            return str(exc)

    def pacing(self, options: Options, kind: str) -> Pacing:
        return ipc_pacing(options)

    def open(self, block: BlockSpec, boxes: Sequence[Box], options: Options) -> RemoteBlock:
        if 0 in block.shape:
            return _EmptyBlock(block, boxes)
        peer, obstacle = self._known(block.holder)
        if obstacle is not None:
            raise TransferError(f"ipc: {block.holder} cannot be read in place: {obstacle}")
        with ExitStack() as undo:
            lease = self._lease(peer, block, options)
            undo.callback(lease.close)
            posted = _Posted.parse(lease.text, block)
            mapping = self._mappings.acquire(peer.folder, posted.buffer_id, posted.handle)
            undo.callback(mapping.release)
            array = cuda_ipc.array_at(
                mapping.address + posted.offset_bytes, posted.shape, posted.strides, block.dtype
            )
            undo.pop_all()
        return _IpcBlock(array, boxes, block, peer.folder, lease, mapping)

    def _known(self, holder: str) -> tuple[_Peer, str | None]:
        """Return where a worker runs, and what keeps its memory from being mapped.

        It is asked once. If it does not answer that is not noted: it may the next time.
        """
        known = self._peers.get(holder)
        if known is None:
            reply = self._ask(holder, _PEER_OP, MEET_S, "where it runs")
            try:
                peer = _Peer(**reply["peer"])
            except (TypeError, KeyError) as exc:
                raise TransferError(f"ipc: {holder} does not say where it runs: {reply}") from exc
            known = self._peers[holder] = (peer, _obstacle(_describe(self._board.folder), peer))
        return known

    def _ask(self, holder: str, op: str, timeout_s: float, about: Any, **kwargs: Any) -> Any:
        """Call a holder's handler, from a task thread."""
        asking = ask(self.host, holder, op, timeout_s, about, **kwargs)
        try:
            return asyncio.run_coroutine_threadsafe(asking, self.host.loop).result(timeout_s + 5)
        except TimeoutError:
            raise TransferError("ipc: no word of the event loop") from None

    def _lease(self, peer: _Peer, block: BlockSpec, options: Options) -> Lease:
        """Take a lease; if the holder does not post by itself, ask it to."""
        deadline_s = time.monotonic() + options.ipc_wait_s
        try:
            while (lease := take(peer.folder, block.key)) is None:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(_POLL_S)
            if lease is None:
                timeout_s = options.request_timeout_s
                about = f"block {block.key!r}"
                reply = self._ask(
                    block.holder, _POST_OP, timeout_s, about, key=block.key, shape=block.shape
                )
                check_reply(reply, block, "ipc")
                lease = take(peer.folder, block.key)
        except OSError as exc:
            raise TransferError(f"ipc: the board of {block.holder} cannot be read: {exc}") from exc
        if lease is None:
            raise TransferError(f"ipc: {block.holder} posted {block}, but took it back at once")
        return lease

    # --- the holder's side ---

    def handlers(self) -> Mapping[str, Handler]:
        return {_PEER_OP: self._answer_peer, _POST_OP: self._answer_post}

    @property
    def leased_bytes(self) -> int:
        return self._board.leased_bytes

    def serving(self, blocks: Mapping[Any, Any]) -> None:
        for key, block in blocks.items():
            if kernel_for(block).name == "cupy" and not self._closed:
                try:
                    # What is held by now: the task may have been cancelled, its block released.
                    self._find_and_post(key, block.shape)
                except (KeyError, OSError, ValueError, P2PError) as exc:
                    # Readers will ask, and be told why.
                    logger.debug("block %r is not posted: %s", key, exc)

    def released(self, key: Any) -> None:
        self._board.retract(key)

    def forget(self, holder: str) -> None:
        known = self._peers.pop(holder, None)
        if known is None:
            return
        self._mappings.retire(known[0].folder)
        self.offload(self._mappings.close_retired)

    def held(self) -> dict[str, int]:
        return {"posted": len(self._board), "mapped": len(self._mappings)}

    async def close(self) -> None:
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        deadline_s = time.monotonic() + _CLOSE_S
        while self._board.close() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        self._mappings.retire(None)
        await self.host.offload(self._mappings.close_retired)

    async def _answer_peer(self, **unknown: Any) -> dict[str, Any]:
        try:
            no_more(unknown)
            peer = await self.host.offload(_describe, self._board.folder)
        except Exception as exc:
            return refuse(exc)
        return {"status": "ok", "peer": asdict(peer)}

    async def _answer_post(
        self, key: Any = None, shape: Any = None, **unknown: Any
    ) -> dict[str, Any]:
        try:
            no_more(unknown)
            checked = checked_key(key), checked_shape(shape)
            await self.host.offload(self._find_and_post, *checked)
        except Exception as exc:
            return refuse(exc)
        return {"status": "ok"}

    def _find_and_post(self, key: Any, shape: Any) -> None:
        intent = self._board.intend(key)
        self._post(key, find_block(self.host, key, shape), intent)

    def _post(self, key: Any, block: Any, intent: Intent) -> None:
        """Describe a block on the board, once all its values are there."""
        cuda_ipc.synchronize_producers(block)
        if self._board.renew(key, block):
            return
        place = cuda_ipc.export(block)
        posted = _Posted(
            key=repr(key),
            shape=tuple(block.shape),
            strides=tuple(block.strides),
            dtype=dtype_text(block.dtype),
            handle=place.handle,
            buffer_id=place.buffer_id,
            offset_bytes=place.offset_bytes,
        )
        self._board.post(key, block, posted.text(), intent)
        self.host.loop.call_soon_threadsafe(self._sweep_later)

    def _sweep_later(self) -> None:
        if self._sweeping is None and not self._closed:
            self._sweeping = self.host.loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        if self._board.sweep(self.options.ipc_retain_s):
            self._sweep_later()


@dataclass(frozen=True, slots=True)
class _Posted:
    """What a notice says about a block."""

    key: str  # its repr
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: str
    handle: str  # of the allocation that the block lies in, in hex
    buffer_id: int  # of that allocation; never used again in its process
    offset_bytes: int  # of the block in it

    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, text: bytes, block: BlockSpec) -> _Posted:
        """Read a notice; refuse one that does not describe the block."""
        try:
            fields = json.loads(text)
            posted = cls(
                **{**fields, "shape": tuple(fields["shape"]), "strides": tuple(fields["strides"])}
            )
        except (ValueError, TypeError, KeyError) as exc:
            raise TransferError(f"ipc: the notice of {block} cannot be read: {exc}") from exc
        if posted.key != repr(block.key):
            raise TransferError(f"ipc: the notice of {block} is that of {posted.key}")
        if posted.shape != tuple(block.shape) or posted.dtype != dtype_text(block.dtype):
            declared = f"{block.dtype} {block.shape}"
            raise mismatch(block, declared, f"{posted.dtype} {posted.shape}")
        return posted


class _IpcBlock(RemoteBlock):
    def __init__(
        self,
        array: Any,
        boxes: Sequence[Box],
        block: BlockSpec,
        folder: str,
        lease: Lease,
        mapping: cuda_ipc.Mapping,
    ) -> None:
        self._array = array
        self._boxes = iter(boxes)
        self._block = block
        self._folder = folder  # of the holder's board
        self._lease: Lease | None = lease
        self._mapping = mapping

    def request(self) -> Pending:
        return Arrived(self._array[box_slices(next(self._boxes))])

    def confirm(self) -> None:
        # What a mapping shows of a process that has ended is nowhere promised.
        if self._lease is not None and not is_tended(self._folder):
            raise BlockUnavailableError(
                f"ipc: {self._block.holder} ended while {self._block} was read"
            )

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._mapping.release()
            self._lease = None


class _EmptyBlock(RemoteBlock):
    """A block without elements: it has no address, and needs no lease."""

    def __init__(self, block: BlockSpec, boxes: Sequence[Box]) -> None:
        self._array = cuda_ipc.empty(block.shape, block.dtype)
        self._boxes = iter(boxes)

    def request(self) -> Pending:
        return Arrived(self._array[box_slices(next(self._boxes))])

    def close(self) -> None:
        pass


def _describe(folder: str) -> _Peer:
    """Describe this process."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return _Peer(
        boot_id=boot_id,
        pid_namespace=os.readlink("/proc/self/ns/pid"),
        user=os.getuid(),
        pid=os.getpid(),
        folder=folder,
        gpu=cuda_ipc.gpu_uuid(),
    )


def _obstacle(here: _Peer, there: _Peer) -> str | None:
    """Say what keeps `here` from mapping memory of `there`."""
    if not there.gpu or not here.gpu:
        return "one of the two has no GPU"
    if here.boot_id != there.boot_id:
        return "they run on different hosts"
    if here.pid_namespace != there.pid_namespace:
        return "they run in different PID namespaces, where CUDA IPC handles do not open"
    if here.user != there.user:
        return "they belong to different users"
    if here.pid == there.pid:
        return "they share a process, which cannot open its own handles"
    return cuda_ipc.peer_obstacle(there.gpu)
