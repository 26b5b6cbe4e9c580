"""What processes of one host tell each other: where they run, and where their blocks lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.transports.reading import Request
from dask_p2p.transports.replies import check_dtype_text, dtype_text, mismatch
from dask_p2p.transports.requests import (
    checked_integer,
    checked_shape,
    checked_strides,
    checked_text,
)

__all__ = ["Descriptor", "Peer", "no_directory", "separation"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a worker runs: what decides whether its memory can be read."""

    boot_id: str
    pid_namespace: str
    user: int
    pid: int
    folder: str  # in which it publishes blocks
    memory_proof: str  # by which the transport finds out whether it reaches that process' memory
    refusal: str | None = None  # why it has none

    @classmethod
    def parse(cls, fields: Any) -> Peer:
        """Read a worker's description of itself; `ValueError` or `TypeError` if it is malformed."""
        peer = cls(**fields)
        for name in ("boot_id", "pid_namespace", "folder", "memory_proof"):
            checked_text(name, getattr(peer, name))
        checked_text("refusal", peer.refusal or "")
        checked_integer("user", peer.user, 0, 2**32)
        checked_integer("pid", peer.pid, 0, 2**31)
        return peer


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a block is, and what it is."""

    key: str  # its repr
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: str
    place: Mapping[str, Any]  # where it is, as the transport describes it

    def text(self) -> bytes:
        # Not by `asdict`, which copies all that there is in the fields.
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def parse(cls, text: bytes, block: Request) -> Descriptor:
        """Read a descriptor; refuse one that does not describe the block."""
        try:
            descriptor = _read(text)
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise TransferError(f"the descriptor of {block} cannot be read: {exc}") from exc
        if descriptor.key != repr(block.key):
            raise TransferError(f"the descriptor of {block} is that of {descriptor.key}")
        if descriptor.shape != tuple(block.shape):
            declared = f"{block.dtype} {block.shape}"
            raise mismatch(block, declared, f"{descriptor.dtype} {descriptor.shape}")
        check_dtype_text(block, dtype_text(block.dtype), descriptor.dtype)
        return descriptor


@lru_cache(maxsize=1024)  # the tasks of a worker read the same blocks, one task after the other
def _read(text: bytes) -> Descriptor:
    fields = json.loads(text)
    shape = checked_shape(fields["shape"])
    strides = checked_strides(fields["strides"], shape)
    checked_text("dtype", fields["dtype"])
    return Descriptor(**{**fields, "shape": shape, "strides": strides})


def separation(local: Peer, remote: Peer) -> Obstacle | None:
    """Return what keeps two processes from reading each other's memory; None if nothing does."""
    if local.boot_id != remote.boot_id:
        return Obstacle("other-host", "they run on different hosts")
    if local.pid_namespace != remote.pid_namespace:
        return Obstacle(
            "other-namespace",
            "they run in different PID namespaces, where neither sees the other",
            "Run all workers of a host in one PID namespace (docker run --pid=host)",
        )
    if local.user != remote.user:
        return Obstacle(
            "other-user", "they belong to different users", "Run all workers of a host as one user"
        )
    if local.pid == remote.pid:
        return Obstacle("same-process", "they share a process")
    return None if remote.refusal is None else no_directory(remote.refusal)


def no_directory(text: str) -> Obstacle:
    """Return the obstacle that a worker cannot publish descriptors."""
    remedy = "Set the worker's --local-directory to a local disk with free space"
    return Obstacle("no-directory", text, remedy)
