"""Memory of other members of one host, read without messages: once copied, and never packed.

A member tells where a region lies, the others read it there, and say so. Until then it stays as it
is. If a member is killed meanwhile its memory ends, or is another's: what was read then is thrown
away with the attempt, since the link has ended too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dask_p2p.interprocess import process_memory
from dask_p2p.sections.links import AttemptEndedError, Links
from dask_p2p.types import Array

__all__ = ["LEAST_BYTES", "Reads", "place_bytes"]

LEAST_BYTES = 1 << 16  # of the parts that two members exchange: messages are quicker below
_LEAST_RUN_BYTES = 256  # of one row of a region; to pack shorter ones is quicker
_PROOF = struct.Struct(
    f"<QQ{process_memory.TOKEN_BYTES}s"
)  # process, address of the token, the token


def place_bytes(ndim: int) -> int:
    """Return how long it is to tell where a region lies."""
    return 8 * (1 + ndim)


class Reads:
    """Which members read whose memory."""

    def __init__(
        self,
        rank: int,  # which member this is
        size: int,  # of how many
        links: Links,  # between them
        is_allowed: bool,  # whether this one's memory may be read, and this one reads
    ) -> None:
        self._rank, self._size, self._links = rank, size, links
        self._is_allowed = is_allowed and process_memory.is_supported()
        self._token = process_memory.new_token()
        self._pids: list[int] = []  # by rank, as soon as members have tried
        self._readers: Any = None  # of each member, whether each other reads it

    def try_all(self) -> None:
        """Find out, once, who can read whom. All members must call this at the same time."""
        if self._readers is not None:
            return
        proof = bytes(_PROOF.size)
        if self._is_allowed:
            process_memory.allow_readers()
            proof = _PROOF.pack(os.getpid(), self._token.ctypes.data, self._token.tobytes())
        proofs = self._links.gather("whether members read each other's memory", proof)
        self._pids = [_PROOF.unpack(each)[0] for each in proofs]
        row = bytes(self._sees(rank, proofs[rank]) for rank in range(self._size))
        rows = self._links.gather("whose memory members read", row)
        self._readers = np.array([np.frombuffer(each, bool) for each in rows]).T

    def _sees(self, rank: int, proof: Any) -> bool:
        pid, address, token = _PROOF.unpack(proof)
        own = rank == self._rank or self._links.is_on_other_host(rank)
        if own or not (pid and self._is_allowed):
            return False
        try:
            return process_memory.holds(pid, address, token)
        except (OSError, OverflowError):
            return False

    def reads_from(self, holder: int) -> bool:
        """Return whether this member reads that one's memory."""
        return bool(self._readers[holder, self._rank])

    def place_for(self, reader: int, region: Array) -> bytes | None:
        """Return where that member reads a region; None if it gets a message."""
        if not self._readers[self._rank, reader]:
            return None
        shape, strides = region.shape, region.strides
        if process_memory.run_bytes_of(shape, strides, region.itemsize) < _LEAST_RUN_BYTES:
            return bytes(place_bytes(region.ndim))
        return struct.pack(f"<Q{region.ndim}q", region.ctypes.data, *strides)

    def read(
        self,
        holder: int,  # whose it is
        place: Any,  # where it lies there
        shape: Sequence[int],
        into: Array,  # where it belongs
        axes: Sequence[int],  # axis i there is axis axes[i] of the region
        memory_of: Callable[[int], Any],  # for so many bytes that cannot be read to there
    ) -> Array | None:
        """Read a region to where it belongs; return it if it has still to be copied there."""
        address, *strides = struct.unpack(f"<Q{len(shape)}q", place)
        pid, dtype = self._pids[holder], into.dtype
        try:
            runs = process_memory.runs_of(address, tuple(shape), tuple(strides), dtype.itemsize)
            if list(axes) == sorted(axes) and process_memory.read_into(pid, runs, into):
                return None
            memory = memory_of(len(runs.addresses) * runs.run_bytes)
            region = process_memory.read(pid, runs, dtype, memory)
        except (OSError, OverflowError) as exc:
            raise AttemptEndedError(f"memory of member {holder} cannot be read: {exc}") from exc
        return np.broadcast_to(region, tuple(shape))
