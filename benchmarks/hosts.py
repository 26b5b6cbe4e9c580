"""Simulation of the orders in which workers of several hosts may read from each other.

``python -m benchmarks.hosts`` simulates a transpose on 2 to 64 hosts of 8 GPUs. Each GPU reads an
equal region from each other one. The program prints the time of each order of the readers' sources
as a multiple of the lower bound: the time of the busiest link if it never idles.

The simulation is fluid. A reader has a few reads open at a time. Reads divide a link's bandwidth
max-min fairly. There is no latency, and switches have unlimited bandwidth. Each GPU has 345 GB/s of
NVLink each way within its host, as measured on H100 and H200. A host has one network interface, or
one for each GPU, with 45 GB/s each way (InfiniBand NDR) or 11 GB/s (100 Gbit Ethernet).
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

from dask_p2p.plans import stage_order

GPUS = 8  # a host
NVLINK_GBS = 345.0  # a GPU, one way
#: Network interfaces: GB/s of each one way, and number a host.
NETWORKS = {
    "NDR, one a GPU": (45.0, GPUS),
    "NDR, one a host": (45.0, 1),
    "100 GbE, one a host": (11.0, 1),
}
HOSTS = (2, 4, 8, 16, 32, 64)
OPEN_READS = 2  # a reader: it requests the next source while the previous one arrives
GRAIN = 0.05  # least time step, as a part of the time of one region alone

#: Takes the reader's rank and the number of ranks; gives the ranks that it reads from, in order.
Order = Callable[[int, int], Sequence[int]]


# --- orders ---


def diagonal(reader: int, ranks: int) -> list[int]:
    """Read from the ranks after the reader's, one after another."""
    return [(reader + stage) % ranks for stage in range(1, ranks)]


def host_first(reader: int, ranks: int) -> list[int]:
    """Read from all ranks of the own host, then of each host after it."""
    host, place = divmod(reader, GPUS)
    hosts = ranks // GPUS
    order = [
        (host + far) % hosts * GPUS + (place + stage) % GPUS
        for far in range(hosts)
        for stage in range(GPUS)
    ]
    return order[1:]


def pairwise(reader: int, ranks: int) -> list[int]:
    """Exchange with one rank a stage: its number is the reader's XOR the stage."""
    return [reader ^ stage for stage in range(1, ranks)]


def left_right(reader: int, ranks: int) -> list[int]:
    """Read from the right and left neighbours, in order of distance."""
    readers = [
        (reader + sign * far) % ranks for far in range(1, ranks // 2 + 1) for sign in (1, -1)
    ]
    return list(dict.fromkeys(readers))


def two_levels(reader: int, ranks: int) -> list[int]:
    """Read in the package's order for several hosts: `dask_p2p.plans.stage_order`."""
    names = [f"{rank:06}" for rank in range(ranks)]
    order = stage_order(names, names[reader], lambda name: str(int(name) // GPUS))
    return [int(name) for name in order[1:]]


ORDERS: dict[str, Order] = {
    "diagonal by rank": diagonal,
    "host first": host_first,
    "pairwise": pairwise,
    "left-right": left_right,
    "two levels": two_levels,
}


# --- simulation ---


@dataclass(frozen=True)
class Found:
    """The simulated time of an order."""

    network: str
    hosts: int
    order: str
    beside: bool  # true if reads within the host run concurrently with reads over the network
    late: float  # delay of the last reader's start, as a part of the bound
    bounds: float  # time from the first reader's start, as a multiple of the lower bound


class Links:
    """The links between ranks: one a rank within its host, and its host's network interfaces.

    Links are numbered: first out of and into each rank, then out of and into each interface.
    """

    def __init__(self, hosts: int, network: str) -> None:
        gbs, per_host = NETWORKS[network]
        self.ranks = hosts * GPUS
        self._sharing = GPUS // per_host  # ranks that share an interface
        self._interfaces = hosts * per_host
        self.gbs = np.repeat([NVLINK_GBS, gbs], [2 * self.ranks, 2 * self._interfaces])

    def of_pairs(self, holders: Any, readers: Any) -> Any:
        """Return the two links of each read: an array of shape (reads, 2)."""
        within = np.stack([holders, self.ranks + readers], axis=1)
        ends = np.stack([holders, readers + self._interfaces * self._sharing], axis=1)
        is_near = holders // GPUS == readers // GPUS
        return np.where(is_near[:, None], within, 2 * self.ranks + ends // self._sharing)

    def bound_s(self) -> float:
        """Return the lower bound for regions of 1 GB between all pairs of ranks."""
        holders, readers = np.divmod(np.arange(self.ranks**2), self.ranks)
        used = self.of_pairs(holders, readers)[holders != readers]
        return float((np.bincount(used.ravel(), minlength=len(self.gbs)) / self.gbs).max())

    def shares_gbs(self, used: Any) -> Any:
        """Return each read's max-min fair bandwidth: an array of shape (reads,)."""
        shares = np.zeros(len(used))
        left_gbs, is_open = self.gbs.copy(), np.ones(len(used), bool)
        while is_open.any():
            counts = np.bincount(used[is_open].ravel(), minlength=len(left_gbs))
            equal_gbs = np.divide(
                left_gbs, counts, out=np.full(len(left_gbs), np.inf), where=counts > 0
            )
            least_gbs = equal_gbs.min()
            is_full = is_open & (equal_gbs[used] <= least_gbs * (1 + 1e-9)).any(axis=1)
            shares[is_full] = least_gbs
            left_gbs -= least_gbs * np.bincount(used[is_full].ravel(), minlength=len(left_gbs))
            is_open &= ~is_full
        return shares


def queues(order: str, reader: int, ranks: int, is_concurrent: bool) -> list[deque[int]]:
    """Return the queues of sources that a reader works through concurrently."""
    ranked = ORDERS[order](reader, ranks)
    if not is_concurrent:
        return [deque(ranked)]
    near = [rank for rank in ranked if is_near(rank, reader)]
    return [deque(rank for rank in ranked if not is_near(rank, reader)), deque(near)]


def is_near(holder: int, reader: int) -> bool:
    """Return true if two ranks are on one host."""
    return holder // GPUS == reader // GPUS


def simulated(network: str, hosts: int, order: str, is_concurrent: bool, late: float) -> Found:
    """Simulate a transpose with a region of 1 GB between all pairs of ranks."""
    links = Links(hosts, network)
    ranks, bound_s = links.ranks, links.bound_s()
    grain_s = GRAIN / max(links.gbs[2 * ranks :])
    slots = [
        (rank, queue)
        for rank in range(ranks)
        for queue in queues(order, rank, ranks, is_concurrent)
        for _ in range(OPEN_READS)
    ]
    readers = np.array([rank for rank, _ in slots])
    of_queue: defaultdict[int, list[int]] = defaultdict(list)
    for slot, (_, queue) in enumerate(slots):
        of_queue[id(queue)].append(slot)
    # The time when each slot takes its next source.
    due_s = np.random.default_rng(0).permutation(ranks)[readers] / (ranks - 1) * late * bound_s
    holders, left_gb, time_s = np.full(len(slots), -1), np.zeros(len(slots)), 0.0
    while True:
        for slot in np.flatnonzero((holders < 0) & (due_s <= time_s)).tolist():
            reader, queue = slots[slot]
            beside_it = [h for h in holders[of_queue[id(queue)]] if h >= 0]
            if not queue:
                due_s[slot] = np.inf
            elif all(is_near(h, reader) == is_near(queue[0], reader) for h in beside_it):
                holders[slot] = queue.popleft()
                left_gb[slot] = 1 + max(left_gb[slot], -GRAIN)
        reading = np.flatnonzero(holders >= 0)
        next_s = due_s[(holders < 0) & (due_s > time_s)].min(initial=np.inf)
        if not len(reading) and np.isinf(next_s):
            return Found(network, hosts, order, is_concurrent, late, time_s / bound_s)
        step_s = next_s - time_s
        if len(reading):
            gbs = links.shares_gbs(links.of_pairs(holders[reading], readers[reading]))
            step_s = min(step_s, max((left_gb[reading] / gbs).min(), grain_s))
            # A step may end a read too late; up to a grain of the excess counts for the next.
            left_gb[reading] -= gbs * step_s
        time_s += step_s
        finished = reading[left_gb[reading] <= 1e-9]
        holders[finished], due_s[finished] = -1, time_s


@click.command()
@click.option("--hosts", multiple=True, type=int, default=HOSTS, show_default=True)
@click.option("--network", "networks", multiple=True, type=click.Choice(list(NETWORKS)))
@click.option("--late", multiple=True, type=float, default=(0.0, 0.1), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    hosts: tuple[int, ...], networks: tuple[str, ...], late: tuple[float, ...], path: Path | None
) -> None:
    """Compare orders on hosts of 8 GPUs without data or a cluster."""
    simulations = []
    cases = product(networks or NETWORKS, hosts, late, (False, True))
    for network, count, share, is_concurrent in cases:
        row = [simulated(network, count, order, is_concurrent, share) for order in ORDERS]
        simulations += row
        print(
            f"{network:<20} {count:>3} hosts, last reader {share:.0%} late, within the host "
            f"{'concurrently' if is_concurrent else 'in turn'}: "
            + ", ".join(f"{simulation.order} {simulation.bounds:.3f}" for simulation in row),
            flush=True,
        )
    assumed = {
        "gpus": GPUS,
        "nvlink_gbs": NVLINK_GBS,
        "networks": {name: {"gbs": gbs, "a_host": n} for name, (gbs, n) in NETWORKS.items()},
        "open_reads": OPEN_READS,
        "grain": GRAIN,
    }
    if path is not None:
        rows = [asdict(simulation) for simulation in simulations]
        path.write_text(json.dumps({**assumed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
