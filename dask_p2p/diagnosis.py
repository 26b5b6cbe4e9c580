"""`check`: how each worker reaches each other, how fast, and what stands in the way.

Every pair of workers moves a known block just as a transpose would move its regions, by the same
code; what it uses and how long it takes is what a transpose would see. All pairs of one stage are
measured at once, each worker reading from one and read by one, as in a transpose.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from dask_p2p.backends import worker_backend
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import options
from dask_p2p.environment import versions
from dask_p2p.link_speed import FAR, Link, clear_probes, measure_from
from dask_p2p.registration import register
from dask_p2p.task import PLUGIN_NAME
from dask_p2p.text_table import html_table, text_table
from dask_p2p.transports.cuda_ipc import POOL_REMEDY
from dask_p2p.types import Kind

__all__ = ["HostPair", "Link", "Problem", "Report", "Status", "check", "find_problems"]

_POOL_GRANULE_BYTES = 2 * 2**20
# Workers in one process pass each other's blocks on as they are.
_EXPECTED = ("other-kind", "same-process")
# Workers of different hosts do not read each other's memory.
_NO_PROBLEM = (*_EXPECTED, "other-host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What one worker is and has."""

    address: str
    host: str  # its name
    had_plugin: bool
    kind: Kind  # of the blocks that were moved: "numpy" or "cupy"
    gpu: str | None = None  # its name
    mig: bool = False
    memory_resource: str | None = None  # RMM's, by the name of its class
    pool_bytes: int | None = None  # size of RMM's pool
    cupy_uses_rmm: bool | None = None  # None without CuPy
    link_gbs: float | None = None  # what the hardware should give, one way; None if unknown
    leased_bytes: int  # of blocks that are kept for readers
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that makes transfers slow, or another transport be used."""

    workers: tuple[str, ...]  # addresses
    what: str
    cure: str


@dataclass(frozen=True, slots=True)
class HostPair:
    """How blocks come from workers of one host to those of another one, or of the same."""

    reader: str  # name of the host
    holder: str
    links: tuple[Link, ...]

    @property
    def transports(self) -> dict[str, int]:
        """Pairs of workers that use a transport, by its name; "none" where nothing works."""
        return dict(Counter(link.transport or "none" for link in self.links).most_common())

    @property
    def gbs(self) -> float:
        """Median of all pairs of workers, 1e9 bytes per second; 0 where nothing works."""
        return median(link.gbs for link in self.links)

    @property
    def latency_s(self) -> float:
        """Median of all pairs of workers for which something works."""
        return median([link.latency_s for link in self.links if link.error is None] or [0.0])

    @property
    def in_the_way(self) -> tuple[str, ...]:
        """Why transports are not used that would be tried first, each reason once."""
        reasons = [
            f"{transport}: {obstacle.text}"
            for link in self.links
            for transport, obstacle in link.obstacles.items()
            if obstacle.code not in _EXPECTED
        ]
        return tuple(dict.fromkeys(reasons + [link.error for link in self.links if link.error]))


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What `check` found. Printed it is text, and in a notebook it is tables."""

    workers: list[Status]
    links: list[Link]
    problems: list[Problem]

    @property
    def hosts(self) -> list[HostPair]:
        """How blocks come from host to host, one for each ordered pair that has links."""
        host_of = {worker.address: worker.host for worker in self.workers}
        pairs: defaultdict[tuple[str, str], list[Link]] = defaultdict(list)
        for link in self.links:
            hosts = [host_of.get(address, address) for address in (link.reader, link.holder)]
            pairs[hosts[0], hosts[1]].append(link)
        return [HostPair(*pair, tuple(links)) for pair, links in sorted(pairs.items())]

    def host_rows(self) -> list[tuple[str, ...]]:
        """Return `hosts` as rows of a table, the first one with the names of the columns."""
        head = ("to host", "from host", "transport", "GB/s", "latency, ms", "in the way")
        rows: list[tuple[str, ...]] = [head]
        for pair in self.hosts:
            used = ", ".join(f"{name} {count}" for name, count in pair.transports.items())
            in_the_way = "; ".join(pair.in_the_way) or "-"
            rows.append((pair.reader, pair.holder, used, *_speed_texts(pair), in_the_way))
        return rows

    def _link_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("reader", "holder", "transport", "GB/s", "latency, ms")]
        for link in self.links:
            used = link.error or str(link.transport)
            rows.append((link.reader, link.holder, used, *_speed_texts(link)))
        return rows

    def _problem_texts(self) -> list[str]:
        texts = [f"{p.what} ({', '.join(p.workers)}). {p.cure}." for p in self.problems]
        return texts or ["Nothing is in the way."]

    def __repr__(self) -> str:
        tables = [text_table(rows) for rows in (self.host_rows(), self._link_rows())]
        return "\n\n".join([*tables, "\n".join(self._problem_texts())])

    def _repr_html_(self) -> str:
        tables = [html_table(rows) for rows in (self.host_rows(), self._link_rows())]
        problems = "".join(f"<li>{escape(text)}</li>" for text in self._problem_texts())
        return f"{''.join(tables)}<ul>{problems}</ul>"


def _speed_texts(link: Link | HostPair) -> tuple[str, str]:
    return f"{link.gbs:.3g}", f"{link.latency_s * 1e3:.2f}"


def check(client: Any = None) -> Any:
    """Find out how the workers of a cluster reach each other, and how fast.

    Registers the plugin if that is missing. While it runs the workers should have nothing else to
    do, or it measures what is left.

    Parameters
    ----------
    client : distributed.Client, optional
        By default the current one.

    Returns
    -------
    Report or awaitable
        ``workers``, ``links`` (one for each ordered pair of workers), ``hosts`` (one for each
        ordered pair of hosts) and ``problems``, each with its cure. Something to await if the
        client is asynchronous.

    Raises
    ------
    ValueError
        If there is no client.
    RegistrationError
        See `register`.
    """
    from distributed import default_client

    client = default_client(client)
    return client.sync(_check, client)


async def _check(client: Any) -> Report:
    had_plugin = await client.run(_has_plugin)
    await register(client)
    statuses = await client.run(_status)
    workers = [Status(had_plugin=had_plugin.get(a, False), **statuses[a]) for a in sorted(statuses)]
    try:
        links = await _measure_links(client, workers)
    finally:
        await client.run(clear_probes)
    return Report(workers, links, find_problems(workers, links, versions()))


async def _measure_links(client: Any, workers: list[Status]) -> list[Link]:
    addresses = [worker.address for worker in workers]
    kinds = {worker.kind for worker in workers}
    kind = kinds.pop() if len(kinds) == 1 else NUMPY.name
    links: list[Link] = []
    for stage in range(1, len(addresses)):
        holders = {a: addresses[(i + stage) % len(addresses)] for i, a in enumerate(addresses)}
        # Tasks bring the client's options with them.
        links += (await client.run(measure_from, holders, kind, options())).values()
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
            if obstacle.code not in _NO_PROBLEM:
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
    different = ", ".join(
        f"{name} {theirs}, here {ours}"
        for name, theirs in worker.versions.items()
        if None not in (theirs, ours := client_versions.get(name)) and theirs != ours
    )
    if different:
        yield f"versions differ from the client's: {different}", "Install the same everywhere"
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
        "host": socket.gethostname(),
        "kind": NUMPY.name,
        "leased_bytes": dask_worker.plugins[PLUGIN_NAME].leased_bytes,
        "versions": versions(),
    }
    return status | worker_backend().device_status()
