"""`check`: measures the transport and speed between each pair of workers, and finds problems.

Every pair of workers moves a known block by the same code as a transpose moves its regions, so
`check` measures the transport and time of a transpose. All pairs of one stage run concurrently, as
in a transpose: each worker reads from one worker and serves one. `check` also measures the later
transports in the order of preference, and reports one that is much faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from statistics import median
from typing import Any, overload

from dask_p2p import tuning
from dask_p2p.backends import worker_backend
from dask_p2p.backends.base import HostLink
from dask_p2p.backends.host import versions
from dask_p2p.backends.host_memory import CANNOT_PIN, REMEDY
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.config import Options, options
from dask_p2p.engine.assembly import Assembly, OutputSpec
from dask_p2p.engine.remote import BlockRef
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import Obstacle, P2PError
from dask_p2p.inputs import checked_client
from dask_p2p.monitoring.runs import html_table, text_table
from dask_p2p.plans import BlockPlan, Piece
from dask_p2p.plugins.context import DaskWorkerContext
from dask_p2p.plugins.registration import register
from dask_p2p.tools.cluster import POOL_GRANULE_BYTES
from dask_p2p.transports.base import PROBE_DTYPE, check_probe, most_probe_bytes, probe_key
from dask_p2p.transports.cuda_ipc import POOL_REMEDY
from dask_p2p.types import AsynchronousClient, Client, Kind

# Obstacles between workers of one process, which share blocks without a transport.
_EXPECTED = ("other-kind", "same-process")
# Workers on different hosts cannot read each other's memory.
_NO_PROBLEM = (*_EXPECTED, "other-host")
_LATENCY_BYTES = 1024
_FEW_REPEATS = 2  # repeats for other transports, which are reported only if much faster


@overload
def check(client: Client | None = None) -> Report: ...


@overload
def check(client: AsynchronousClient) -> Awaitable[Report]: ...


def check(client: Any = None) -> Any:
    """Measure the transports between a cluster's workers, and find causes of slow transfers.

    A missing plugin is registered, and is no problem in the report. Run it on an idle cluster:
    other work slows the measured transfers down.

    Parameters
    ----------
    client : distributed.Client, optional
        Default: the current client.

    Returns
    -------
    Report or awaitable
        A report, or an awaitable of one if the client is asynchronous. ``workers`` includes the
        rates of copies between host and GPU. ``links`` has an entry for each ordered pair of
        workers. ``problems`` has causes and cures.

    Raises
    ------
    ValueError, InputError, ConfigError
        See `register`.

    See Also
    --------
    last_runs : The rates and transports of runs.

    Examples
    --------
    >>> from dask_p2p import check, local_cluster
    >>> with local_cluster(2) as cluster:  # doctest: +SKIP
    ...     print(check(cluster.get_client()))
    """
    client = checked_client(client)
    return client.sync(_check, client)


async def _check(client: Any) -> Report:
    await register(client)
    statuses = await client.run(_status)
    addresses = sorted(statuses)
    workers = [statuses[address] for address in addresses]
    kinds = {worker["kind"] for worker in workers}
    kind = kinds.pop() if len(kinds) == 1 else NUMPY.name
    links: list[Link] = []
    try:
        for stage in range(1, len(addresses)):
            holders = {a: addresses[(i + stage) % len(addresses)] for i, a in enumerate(addresses)}
            # As with tasks, the client's options are sent along.
            links += (await client.run(_measure_from, holders, kind, options())).values()
    finally:
        await client.run(lambda dask_worker: dask_worker.plugins[PLUGIN_NAME].clear_probes())
    links.sort(key=lambda link: (link.reader, link.holder))
    return Report(workers, links, find_problems(workers, links, versions()))


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of `check`: text if it is printed, tables in a notebook.

    Attributes
    ----------
    workers : list of dict
        The state of each worker: its ``address``, ``host``, the ``kind`` of the measured blocks and
        the ``versions`` of packages. With a GPU also its name, ``gpu``, whether it is a MIG
        instance, ``mig``, and RMM's ``memory_resource``, ``pool_bytes`` and ``cupy_uses_rmm``.
        ``link_gbs`` is the nominal rate of its NVLinks in one direction. ``host_link`` has the
        measured rates of copies to it, from it and in both directions. ``cannot_pin`` is the reason
        why no host memory could be pinned for them. Rates are in 1e9 bytes per second.
    links : list of Link
        Measurement of each ordered pair of workers.
    problems : list of Problem
        Causes of slow transfers, with cures.
    """

    workers: list[dict[str, Any]]
    links: list[Link]
    problems: list[Problem]

    def _tables(self) -> dict[str, list[tuple[str, ...]]]:
        """Return the rows of tables by title; rows of the matrix are readers, columns holders."""
        tables = {"Workers": _worker_rows(self.workers)}
        if len({worker["host"] for worker in self.workers}) > 1:
            tables["Between hosts"] = _host_rows(self.workers, self.links)
        if self.links:
            cells = {
                (link.reader, link.holder): "none"
                if link.transport is None
                else f"{link.transport} {link.gbs:.3g} {link.latency_s * 1e3:.2f}"
                for link in self.links
            }
            addresses = [worker["address"] for worker in self.workers]
            tables["Transport, GB/s of one large block, ms of a small block"] = [
                ("from", *map(str, range(len(addresses)))),
                *(
                    (f"to {n}", *(cells.get((reader, holder), "-") for holder in addresses))
                    for n, reader in enumerate(addresses)
                ),
            ]
        return tables

    def _lines(self) -> list[str]:
        """Return the summary: median rate and problems, one line each."""
        lines = []
        rates = [link.gbs for link in self.links if link.error is None]
        nominal = [worker["link_gbs"] for worker in self.workers if worker.get("link_gbs")]
        if rates:
            lines.append(f"Median of all pairs: {median(rates):.3g} GB/s")
        if rates and nominal:
            lines[0] += f"; the NVLinks of a GPU should carry {min(nominal):.3g} GB/s one way"
        numbers = {worker["address"]: str(n) for n, worker in enumerate(self.workers)}
        for problem in self.problems:
            named = ", ".join(numbers.get(address, address) for address in problem.workers)
            lines.append(f"Worker {named}: {problem.fault}. {problem.cure}.")
        if len(self.workers) < 2:
            lines.append("No pair of workers to check: have the others joined?")
        elif not self.problems:
            lines.append("No problems found.")
        return lines

    def __repr__(self) -> str:
        tables = [f"{title}\n{text_table(rows)}" for title, rows in self._tables().items()]
        return "\n\n".join([*tables, "\n".join(self._lines())])

    def _repr_html_(self) -> str:
        tables = [f"<h4>{title}</h4>{html_table(rows)}" for title, rows in self._tables().items()]
        lines = "".join(f"<li>{escape(line)}</li>" for line in self._lines())
        return f"{''.join(tables)}<ul>{lines}</ul>"


def _worker_rows(workers: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    head = ("worker", "host", "address", "blocks", "GPU", "RMM", "pool", "to, from GPU, both, GB/s")
    rows: list[tuple[str, ...]] = [head]
    for number, worker in enumerate(workers):
        pool_bytes, rates = worker.get("pool_bytes"), worker.get("host_link")
        rows.append(
            (
                *(str(number), worker["host"], worker["address"], worker["kind"]),
                *(worker.get(name) or "-" for name in ("gpu", "memory_resource")),
                "-" if pool_bytes is None else f"{pool_bytes / 2**30:.1f} GiB",
                "-" if rates is None else ", ".join(f"{gbs:.3g}" for gbs in rates),
            )
        )
    # Columns of GPUs only if a worker has one.
    columns = [column for column in zip(*rows, strict=True) if {*column[1:]} != {"-"}]
    return [*zip(*columns, strict=True)]


def _host_rows(
    workers: Iterable[Mapping[str, Any]], links: Iterable[Link]
) -> list[tuple[str, ...]]:
    """Return a row for each ordered pair of hosts: medians of the pairs of their workers."""
    host_of = {worker["address"]: worker["host"] for worker in workers}
    pairs: defaultdict[tuple[str, str], list[Link]] = defaultdict(list)
    for link in links:
        pairs[host_of[link.reader], host_of[link.holder]].append(link)
    rows: list[tuple[str, ...]] = [
        ("to host", "from host", "transport", "GB/s", "latency, ms", "in the way")
    ]
    for pair, of_pair in sorted(pairs.items()):
        latencies_s = [link.latency_s for link in of_pair if link.error is None] or [0.0]
        counts = Counter(link.transport or "none" for link in of_pair).most_common()
        obstacles = dict.fromkeys(
            f"{transport}: {obstacle.text}"
            for link in of_pair
            for transport, obstacle in link.obstacles.items()
            if obstacle.code not in _EXPECTED
        ) | dict.fromkeys(link.error for link in of_pair if link.error)
        rows.append(
            (
                *pair,
                ", ".join(f"{name} {count}" for name, count in counts),
                f"{median(link.gbs for link in of_pair):.3g}",
                f"{median(latencies_s) * 1e3:.2f}",
                "; ".join(obstacles) or "-",
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Link:
    """The measured transfer from one worker to another.

    Attributes
    ----------
    reader, holder : str
        Addresses of the workers.
    transport : str or None
        Transport in use; None if none works.
    gbs : float
        Rate for one large block, in 1e9 bytes per second.
    latency_s : float
        Seconds for one small block.
    obstacles : mapping of str to Obstacle
        Obstacles to preferred transports, by transport.
    error : str or None
        Reason why the block could not be read.
    quicker : str or None
        Transport later in the order that takes less than half the time.
    """

    reader: str
    holder: str
    transport: str | None
    gbs: float
    latency_s: float
    obstacles: Mapping[str, Obstacle] = field(default_factory=dict)
    error: str | None = None
    quicker: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A cause of slow transfers, or the reason why a preferred transport is not used.

    Attributes
    ----------
    workers : tuple of str
        Addresses of the affected workers.
    fault : str
        The cause.
    cure : str
        The remedy.
    """

    workers: tuple[str, ...]
    fault: str
    cure: str


def find_problems(
    workers: Iterable[Mapping[str, Any]],
    links: Iterable[Link],
    client_versions: Mapping[str, str | None],  # versions of libraries in the client
) -> list[Problem]:
    """Return the known causes of slow transfers and unused transports, with their workers."""
    causes: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for worker in workers:
        for cause in _worker_problems(worker, client_versions):
            causes[cause].append(worker["address"])
    for link in links:
        if link.error is not None:
            text = f"no transport brings blocks from {link.holder}: {link.error}"
            causes[text, "Check that the two workers can connect to each other"].append(link.reader)
        if link.quicker is not None:
            times = f"{tuning.current.check_speed_up:g} times"
            text = f"{link.quicker} is more than {times} as fast as {link.transport}"
            causes[text, "Put it first in p2p.transports.order"].append(link.reader)
        for transport, obstacle in link.obstacles.items():
            if obstacle.code not in _NO_PROBLEM:
                text = f"{transport} is not used: {obstacle.text}"
                causes[text, obstacle.remedy].append(link.reader)
    return [Problem(tuple(dict.fromkeys(addresses)), *cause) for cause, addresses in causes.items()]


def _worker_problems(
    worker: Mapping[str, Any], client_versions: Mapping[str, str | None]
) -> Iterable[tuple[str, str]]:
    different = ", ".join(
        f"{name} {version}, here {client_version}"
        for name, version in worker["versions"].items()
        if None not in (version, client_version := client_versions.get(name))
        and version != client_version
    )
    if different:
        text = f"versions differ from the client's: {different}"
        yield text, "Install the same versions everywhere"
    if worker.get("mig"):
        yield (
            "the GPU is a MIG instance, which has no CUDA IPC and no NVLink",
            "Use whole GPUs, or accept the transport comm",
        )
    if (cause := worker.get("cannot_pin")) is not None:
        yield f"{CANNOT_PIN} ({cause})", REMEDY.removesuffix(".")
    resource, pool_bytes = worker.get("memory_resource"), worker.get("pool_bytes")
    if pool_bytes and pool_bytes % POOL_GRANULE_BYTES:
        text = f"RMM's pool of {pool_bytes} bytes is not a multiple of 2 MiB"
        yield f"{text}: mapping it takes seconds for each peer", POOL_REMEDY
    if worker["kind"] == "cupy" and resource in (None, "CudaMemoryResource"):
        text = "GPU memory does not come from a pool: peers map each new array, 10 ms a GiB"
        yield text, POOL_REMEDY
    if resource in ("CudaAsyncMemoryResource", "ManagedMemoryResource"):
        yield f"CUDA IPC cannot share memory of RMM's {resource}", POOL_REMEDY
    if resource not in (None, "CudaMemoryResource") and worker.get("cupy_uses_rmm") is False:
        text = "CuPy does not allocate from RMM's pool, so two pools compete for the GPU's memory"
        yield text, POOL_REMEDY


# --- on the workers ---


async def _status(dask_worker: Any) -> dict[str, Any]:
    """Return this worker's entry in a `Report`, with the rates of copies to a GPU and from it."""
    causes: list[str] = []

    def measure() -> HostLink | None:
        with contextlib.suppress(MemoryError):  # no GPU memory is left
            return worker_backend().host_link(lambda problem, cause: causes.append(cause))
        return None

    rates = await asyncio.to_thread(measure)
    return {
        "address": dask_worker.address,
        "host": socket.gethostname(),
        "kind": NUMPY.name,
        "versions": versions(),
        **worker_backend().device_status(),
        "host_link": rates,
        "cannot_pin": next(iter(causes), None),
    }


async def _measure_from(
    holders: Mapping[str, str], kind: Kind, options: Options, dask_worker: Any
) -> Link:
    holder = holders[dask_worker.address]
    return await asyncio.to_thread(_measure_link, dask_worker, holder, kind, options)


def _measure_link(reader: Any, holder: str, kind: Kind, options: Options) -> Link:
    """Return the measured link, with a transport that takes less than half the time, if any."""
    context: DaskWorkerContext = reader.plugins[PLUGIN_NAME].context
    nbytes = most_probe_bytes(kind, reader.memory_manager.memory_limit or None)
    order, repeats = options.order(kind), tuning.current.check_repeats
    router = context.router

    def obstacle_to(transport: str) -> Obstacle | None:
        obstacle: Obstacle | None = router.transports[transport].obstacle(holder, kind, PROBE_DTYPE)
        return obstacle or router.failures.get((holder, transport))

    try:
        router.find_routes([holder], kind, PROBE_DTYPE, order)  # probes them before any timing
        latency_s, _ = _time_read(context, holder, kind, _LATENCY_BYTES, options, repeats)
        time_s, transport = _time_read(context, holder, kind, nbytes, options, repeats)
    except P2PError as exc:
        error = f"{type(exc).__name__}: {exc}"
        return Link(context.address, holder, None, 0.0, 0.0, error=error)
    used, times_s = order.index(transport), {}
    for name in order[used + 1 :]:
        if obstacle_to(name) is None:
            alone = replace(options, transports=(name,))
            with contextlib.suppress(P2PError):
                times_s[name], _ = _time_read(context, holder, kind, nbytes, alone, _FEW_REPEATS)
    best = min(times_s, key=lambda name: times_s[name], default=None)
    if best is not None and tuning.current.check_speed_up * times_s[best] >= time_s:
        best = None
    obstacles = {name: why for name in order[:used] if (why := obstacle_to(name)) is not None}
    gbs = nbytes / time_s / 1e9
    return Link(context.address, holder, transport, gbs, latency_s, obstacles, quicker=best)


def _time_read(
    context: DaskWorkerContext, holder: str, kind: Kind, nbytes: int, options: Options, repeats: int
) -> tuple[float, str]:
    """Return the least time of a probe block, read as a task would, and its transport."""
    key: tuple[Any, ...] = probe_key(kind, nbytes)
    name, index = key[0], key[1:]  # as for a block of an array with this name
    shape, box = (nbytes,), ((0, nbytes),)
    plan = BlockPlan(shape, (0,), (index,), (shape,), (Piece(0, box, box),))
    output = OutputSpec((name,), PROBE_DTYPE, kind, options)
    best_s, transport = float("inf"), ""
    for _ in range(repeats):
        start_s = time.perf_counter()
        assembly = Assembly(plan, output, [BlockRef(key, (holder,))], context)
        region, transport = assembly.run(), assembly.sources.stages[-1].transport
        best_s = min(best_s, time.perf_counter() - start_s)
    check_probe(region)
    return best_s, transport
