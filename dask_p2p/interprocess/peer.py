"""Where a worker runs, and what keeps two processes from reading each other's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask_p2p.errors import Obstacle
from dask_p2p.interprocess.requests import checked_integer, checked_text


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a worker runs: what decides whether its memory can be read."""

    boot_id: str
    pid_namespace: str
    user: int
    pid: int
    process: str  # its name, which no other process has
    folder: str  # in which it publishes blocks
    memory_proof: str  # by which the transport finds out whether it reaches that process' memory
    refusal: str | None = None  # why it has none

    @classmethod
    def parse(cls, fields: Any) -> Peer:
        """Read a worker's description of itself; `ValueError` or `TypeError` if it is malformed."""
        peer = cls(**fields)
        for name in ("boot_id", "pid_namespace", "process", "folder", "memory_proof"):
            checked_text(name, getattr(peer, name))
        checked_text("refusal", peer.refusal or "")
        checked_integer("user", peer.user, 0, 2**32)
        checked_integer("pid", peer.pid, 0, 2**31)
        return peer


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
