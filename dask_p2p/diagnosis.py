"""`check`: how each worker reaches each other, how fast, and what stands in the way.

Every pair of workers moves a known block just as a transpose would move its regions, by the same
code; what it uses and how long it takes is what a transpose would see. All pairs of one stage are
measured at once, each worker reading from one and read by one, as in a transpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dask_p2p.backends import worker_backend
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import options
from dask_p2p.environment import versions
from dask_p2p.link_speed import FAR, Link, clear_probes, measure_from
from dask_p2p.registration import register
from dask_p2p.task import PLUGIN_NAME
from dask_p2p.transports.cuda_ipc import POOL_REMEDY

__all__ = ["Link", "Problem", "Report", "Status", "check", "find_problems"]

_POOL_GRANULE_BYTES = 2 * 2**20
# Workers in one process pass each other's blocks on as they are.
_EXPECTED = ("other-kind", "same-process")


@dataclass(frozen=True, slots=True)
class Status:
    """What one worker is and has."""

    address: str
    had_plugin: bool
    kind: str  # of the blocks that were moved: "numpy" or "cupy"
    gpu: str | None  # its name
    mig: bool
    memory_resource: str | None  # RMM's, by the name of its class
    pool_bytes: int | None  # size of RMM's pool
    cupy_uses_rmm: bool | None  # None without CuPy
    link_gbs: float | None  # what the hardware should give, one way; None where that is unknown
    leased_bytes: int  # of blocks that are kept for readers
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that makes transfers slow, or another transport be used."""

    workers: tuple[str, ...]  # addresses
    what: str
    cure: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found."""

    workers: list[Status]
    links: list[Link]
    problems: list[Problem]

    def __str__(self) -> str:
        lines = ["reader <- holder: transport, GB/s, latency in ms"]
        lines += [
            f"{link.reader} <- {link.holder}: "
            + (
                f"{link.transport}, {link.gbs:.3g}, {link.latency_s * 1e3:.2f}"
                if link.error is None
                else link.error
            )
            for link in self.links
        ]
        lines += [f"{p.what} ({', '.join(p.workers)}). {p.cure}." for p in self.problems]
        return "\n".join(lines)


def check(client: Any = None) -> Report:
    """Find out how the workers of a cluster reach each other, and how fast.

    Registers the plugin if that is missing. While it runs the workers should have nothing else to
    do, or it measures what is left.

    Parameters
    ----------
    client : distributed.Client, optional
        A synchronous one; by default the current one.

    Returns
    -------
    Report
        ``workers``, ``links`` (one for each ordered pair) and ``problems``, each with its cure.

    Raises
    ------
    ValueError
        If there is no client.
    InputError
        If the client is asynchronous.
    """
    from distributed import default_client

    from dask_p2p.errors import InputError

    client = default_client(client)
    if client.asynchronous:
        raise InputError(
            "expected a synchronous client, got an asynchronous one. Run check from a thread of "
            "its own, with a client of its own."
        )
    had_plugin = client.run(_has_plugin)
    register(client)
    statuses = client.run(_status)
    workers = [
        Status(**{**statuses[a], "had_plugin": had_plugin.get(a, False)}) for a in sorted(statuses)
    ]
    links = _measure_links(client, workers)
    return Report(workers, links, find_problems(workers, links, versions()))


def _measure_links(client: Any, workers: list[Status]) -> list[Link]:
    addresses = [worker.address for worker in workers]
    kinds = {worker.kind for worker in workers}
    kind = kinds.pop() if len(kinds) == 1 else NUMPY.name
    links: list[Link] = []
    for stage in range(1, len(addresses)):
        holders = {a: addresses[(i + stage) % len(addresses)] for i, a in enumerate(addresses)}
        # Tasks bring the client's options with them.
        links += client.run(measure_from, holders, kind, options()).values()
    client.run(clear_probes)
    return sorted(links, key=lambda link: (link.reader, link.holder))


def find_problems(
    workers: Iterable[Status], links: Iterable[Link], client_versions: Mapping[str, str | None]
) -> list[Problem]:
    """Name the known causes of slow or unwanted transfers.

    Parameters
    ----------
    workers, links
        What was found.
    client_versions
        Versions that the client has.
    """
    causes: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for worker in workers:
        for text, cure in _problems_of(worker, client_versions):
            causes[text, cure].append(worker.address)
    for link in links:
        if link.error is not None:
            text = f"no transport brings blocks from {link.holder}: {link.error}"
            cure = "See whether the two workers can connect to each other"
            causes[text, cure].append(link.reader)
        if link.quicker is not None:
            text = f"{link.quicker} is more than {FAR} times as fast as {link.transport}"
            causes[text, "Name it first in p2p.transports.order"].append(link.reader)
        for transport, obstacle in link.obstacles.items():
            if obstacle.code not in _EXPECTED:
                text = f"{transport} is not used: {obstacle.text}"
                causes[text, obstacle.remedy].append(link.reader)
    return [Problem(tuple(dict.fromkeys(addresses)), *cause) for cause, addresses in causes.items()]


def _problems_of(
    worker: Status, client_versions: Mapping[str, str | None]
) -> Iterable[tuple[str, str]]:
    if not worker.had_plugin:
        yield (
            "the worker plugin was missing; it has been registered now",
            "Call dask_p2p.register(client), or start workers with --preload dask_p2p.preload",
        )
    different = {
        name: (theirs, client_versions.get(name))
        for name, theirs in worker.versions.items()
        if theirs is not None
        and client_versions.get(name) is not None
        and theirs != client_versions[name]
    }
    if different:
        texts = ", ".join(f"{n} {theirs}, here {ours}" for n, (theirs, ours) in different.items())
        yield f"versions differ from the client's: {texts}", "Install the same everywhere"
    if worker.mig:
        yield (
            "the GPU is a MIG instance, which has no CUDA IPC and no NVLink",
            "Use whole GPUs, or expect comm",
        )
    resource, pool_bytes = worker.memory_resource, worker.pool_bytes
    if pool_bytes and pool_bytes % _POOL_GRANULE_BYTES:
        yield (
            f"RMM's pool of {pool_bytes} bytes is no multiple of 2 MiB: mapping it takes seconds "
            f"for each peer",
            POOL_REMEDY,
        )
    if resource in ("CudaAsyncMemoryResource", "ManagedMemoryResource"):
        yield f"CUDA IPC cannot share memory of RMM's {resource}", POOL_REMEDY
    if resource not in (None, "CudaMemoryResource") and worker.cupy_uses_rmm is False:
        yield (
            "CuPy allocates from another pool than RMM's: the two take memory from each other",
            POOL_REMEDY,
        )


# --- on the workers ---


def _has_plugin(dask_worker: Any) -> bool:
    return PLUGIN_NAME in dask_worker.plugins


def _status(dask_worker: Any) -> dict[str, Any]:
    """Describe this worker, in words that can be sent."""
    status: dict[str, Any] = {
        "address": dask_worker.address,
        "had_plugin": True,
        "kind": NUMPY.name,
        "gpu": None,
        "mig": False,
        "memory_resource": None,
        "pool_bytes": None,
        "cupy_uses_rmm": None,
        "link_gbs": None,
        "leased_bytes": dask_worker.plugins[PLUGIN_NAME].leased_bytes,
        "versions": versions(),
    }
    return status | worker_backend().device_status()
