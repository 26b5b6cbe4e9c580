"""Processes of workers, and the obstacles to reading each other's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dask_p2p.backends.host.hardware import kernel_and_namespace
from dask_p2p.errors import Obstacle
from dask_p2p.interprocess.processes import own_name


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of a worker, as far as it decides if others can read its memory."""

    boot_id: str
    pid_namespace: str
    user: int
    pid: int
    process: str  # unique name of the process
    folder: str  # folder of its published descriptors, if any
    memory_proof: str  # token that proves access to the process's memory
    refusal: str | None = None  # reason why it has no folder

    @classmethod
    def own(cls, memory_proof: str, folder: str = "", refusal: str | None = None) -> Peer:
        """Describe this process."""
        own = *kernel_and_namespace(), os.getuid(), os.getpid(), own_name()
        return cls(*own, folder, memory_proof, refusal)


def separation(local: Peer, remote: Peer) -> Obstacle | None:
    """Return the obstacle to two processes' reading each other's memory, or None."""
    if local.boot_id != remote.boot_id:
        return Obstacle("other-host", "they run on different hosts")
    if local.pid_namespace != remote.pid_namespace:
        return Obstacle(
            "other-namespace",
            "they run in different PID namespaces",
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
    """Return the obstacle of a worker that cannot publish descriptors."""
    remedy = "Set the worker's --local-directory to a local disk with free space"
    return Obstacle("no-directory", text, remedy)
