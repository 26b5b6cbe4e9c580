"""The report of `check`: workers, the links between them, and problems."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from statistics import median

from dask_p2p.backends.base import HostLink
from dask_p2p.errors import Obstacle
from dask_p2p.monitoring.runs import html_table, text_table
from dask_p2p.types import Kind

#: Obstacles between workers of one process, which share blocks without a transport.
EXPECTED = ("other-kind", "same-process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The hardware and software state of one worker.

    Attributes
    ----------
    address, host : str
        Address of the worker, and name of its host.
    had_plugin : bool
        Whether the worker had the plugin before `check` registered it.
    kind : str
        Kind of the measured blocks: "numpy" or "cupy".
    gpu : str or None
        Name of the GPU.
    mig : bool
        Whether the GPU is a MIG instance.
    memory_resource : str or None
        Class name of RMM's memory resource.
    pool_bytes : int or None
        Size of RMM's pool.
    cupy_uses_rmm : bool or None
        Whether CuPy allocates from RMM; None without CuPy.
    link_gbs : float or None
        Nominal rate of the GPU's NVLinks in one direction, in 1e9 bytes per second.
    host_link : HostLink or None
        Measured rates between host and GPU.
    cannot_pin : str or None
        Reason why no host memory could be pinned for `host_link`.
    leased_bytes : int
        Size of blocks that are kept for readers.
    versions : mapping of str to str or None
        Versions of packages; None for a package that is not installed.
    """

    address: str
    host: str
    had_plugin: bool
    kind: Kind
    gpu: str | None = None
    mig: bool = False
    memory_resource: str | None = None
    pool_bytes: int | None = None
    cupy_uses_rmm: bool | None = None
    link_gbs: float | None = None
    host_link: HostLink | None = None
    cannot_pin: str | None = None
    leased_bytes: int
    versions: Mapping[str, str | None]


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


@dataclass(frozen=True, slots=True)
class HostPair:
    """The links from workers of one host to workers of another host or the same host.

    Attributes
    ----------
    reader, holder : str
        Names of the hosts.
    links : tuple of Link
        A link for each pair of workers.
    """

    reader: str
    holder: str
    links: tuple[Link, ...]

    @property
    def transports(self) -> dict[str, int]:
        """Number of worker pairs by transport; "none" for pairs that no transport joins."""
        return dict(Counter(link.transport or "none" for link in self.links).most_common())

    @property
    def gbs(self) -> float:
        """Median rate of all worker pairs, in 1e9 bytes per second; 0 for a pair with an error."""
        return median(link.gbs for link in self.links)

    @property
    def latency_s(self) -> float:
        """Median latency of all worker pairs that a transport joins."""
        return median([link.latency_s for link in self.links if link.error is None] or [0.0])

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Reasons why preferred transports are not used, each once."""
        reasons = [
            f"{transport}: {obstacle.text}"
            for link in self.links
            for transport, obstacle in link.obstacles.items()
            if obstacle.code not in EXPECTED
        ]
        return tuple(dict.fromkeys(reasons + [link.error for link in self.links if link.error]))


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of `check`: text if it is printed, tables in a notebook.

    Attributes
    ----------
    workers : list of Status
        State of each worker.
    links : list of Link
        Measurement of each ordered pair of workers.
    problems : list of Problem
        Causes of slow transfers, with cures.
    """

    workers: list[Status]
    links: list[Link]
    problems: list[Problem]

    @property
    def hosts(self) -> list[HostPair]:
        """Links by pair of hosts, one entry for each ordered pair with links."""
        host_of = {worker.address: worker.host for worker in self.workers}
        pairs: defaultdict[tuple[str, str], list[Link]] = defaultdict(list)
        for link in self.links:
            hosts = [host_of.get(address, address) for address in (link.reader, link.holder)]
            pairs[hosts[0], hosts[1]].append(link)
        return [HostPair(*pair, tuple(links)) for pair, links in sorted(pairs.items())]

    def _tables(self) -> dict[str, list[tuple[str, ...]]]:
        """Return the rows of tables by title; rows of matrices are readers, columns are holders."""
        tables = {"Workers": _worker_rows(self.workers)}
        if any(worker.host_link for worker in self.workers):
            tables["GB/s between pinned host memory and the GPU"] = _host_link_rows(self.workers)
        if len({worker.host for worker in self.workers}) > 1:
            tables["Between hosts"] = _host_rows(self.hosts)
        if self.links:
            links = {(link.reader, link.holder): link for link in self.links}
            cells = {
                "Transport": {pair: link.transport or "none" for pair, link in links.items()},
                "GB/s of one large block": {p: f"{link.gbs:.3g}" for p, link in links.items()},
                "Latency of a small block, ms": {
                    pair: f"{link.latency_s * 1e3:.2f}" for pair, link in links.items()
                },
            }
            addresses = [worker.address for worker in self.workers]
            head = ("from", *map(str, range(len(addresses))))
            for title, of_pair in cells.items():
                tables[title] = [head]
                for number, reader in enumerate(addresses):
                    row = [of_pair.get((reader, holder), "-") for holder in addresses]
                    tables[title].append((f"to {number}", *row))
        return tables

    def _lines(self) -> list[str]:
        """Return the summary: median rate and problems, one line each."""
        lines = []
        good = [link.gbs for link in self.links if link.error is None]
        should = [worker.link_gbs for worker in self.workers if worker.link_gbs]
        if good:
            lines.append(f"Median of all pairs: {median(good):.3g} GB/s")
        if good and should:
            lines[0] += f"; the NVLinks of a GPU should carry {min(should):.3g} GB/s one way"
        numbers = {worker.address: str(number) for number, worker in enumerate(self.workers)}
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


def _worker_rows(workers: Iterable[Status]) -> list[tuple[str, ...]]:
    head = ("worker", "host", "address", "blocks", "GPU", "RMM", "pool", "kept for readers")
    rows: list[tuple[str, ...]] = [head]
    for number, worker in enumerate(workers):
        pool = "-" if worker.pool_bytes is None else f"{worker.pool_bytes / 2**30:.1f} GiB"
        memory = worker.memory_resource or "-", pool, f"{worker.leased_bytes / 2**20:.1f} MiB"
        position = worker.host, worker.address, worker.kind, worker.gpu or "-"
        rows.append((str(number), *position, *memory))
    return rows


def _host_link_rows(workers: Iterable[Status]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("worker", "to the GPU", "from the GPU", "both directions")]
    for number, worker in enumerate(workers):
        if worker.host_link is not None:
            rows.append((str(number), *(f"{gbs:.3g}" for gbs in worker.host_link)))
    return rows


def _host_rows(pairs: Iterable[HostPair]) -> list[tuple[str, ...]]:
    head = ("to host", "from host", "transport", "GB/s", "latency, ms", "in the way")
    rows: list[tuple[str, ...]] = [head]
    for pair in pairs:
        used = ", ".join(f"{name} {count}" for name, count in pair.transports.items())
        speed = f"{pair.gbs:.3g}", f"{pair.latency_s * 1e3:.2f}"
        rows.append((pair.reader, pair.holder, used, *speed, "; ".join(pair.obstacles) or "-"))
    return rows
