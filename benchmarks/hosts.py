"""In which order workers of several hosts should read from each other, simulated.

``python -m benchmarks.hosts`` has 2 to 64 hosts of 8 GPUs transpose an array, each GPU reading an
equal region from each. It prints the time of each order of the readers' sources as a multiple of
the lower bound: the time of the busiest link if it never rests.

The simulation is fluid. A reader has a few reads open at a time. Reads that share a link share what
it carries (max-min fair). There is no latency, and switches carry everything. Links between the
GPUs of a host carry 345 GB/s each way for each GPU, as NVLinks of H100 and H200 were measured. A
host has one network interface, or one for each GPU: of 45 GB/s each way (InfiniBand NDR), or of 11
(100 Gbit Ethernet).
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

GPUS = 8  # of a host
NVLINK_GBS = 345.0  # of a GPU, one way
#: Network interfaces: what each carries one way, GB/s, and how many a host has.
NETWORKS = {
    "NDR, one a GPU": (45.0, GPUS),
    "NDR, one a host": (45.0, 1),
    "100 GbE, one a host": (11.0, 1),
}
HOSTS = (2, 4, 8, 16, 32, 64)
OPEN_READS = 2  # of a reader: the next source is asked while the one before arrives
GRAIN = 0.05  # of the time of a region alone: what ends within it ends together

#: Takes the reader's rank and the number of ranks; gives the ranks that it reads from, in order.
Order = Callable[[int, int], Sequence[int]]


# --- orders ---


def diagonal(reader: int, ranks: int) -> list[int]:
    """Read from the ranks after the reader's, one after another."""
    return [(reader + stage) % ranks for stage in range(1, ranks)]


def host_first(reader: int, ranks: int) -> list[int]:
    """Read from the own host, then from the hosts after it, each as a whole."""
    host, place = divmod(reader, GPUS)
    hosts = ranks // GPUS
    order = [
        (host + far) % hosts * GPUS + (place + stage) % GPUS
        for far in range(hosts)
        for stage in range(GPUS)
    ]
    return order[1:]


def pairwise(reader: int, ranks: int) -> list[int]:
    """Exchange with one rank after the other: the numbers differ in the bits of the stage."""
    return [reader ^ stage for stage in range(1, ranks)]


def left_right(reader: int, ranks: int) -> list[int]:
    """Read from the right and the left neighbour, then from those behind them, and so on."""
    both = [(reader + sign * far) % ranks for far in range(1, ranks // 2 + 1) for sign in (1, -1)]
    return list(dict.fromkeys(both))


def two_levels(reader: int, ranks: int) -> list[int]:
    """Read as the package does where it knows the hosts: `dask_p2p.plans.stage_order`."""
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
    """What an order took."""

    network: str
    hosts: int
    order: str
    beside: bool  # whether reads within the host go on beside those over the network
    late: float  # share of the bound by which the last reader starts after the first one
    bounds: float  # times the lower bound, from when the first one starts


class Links:
    """What joins ranks: each has a link within its host, and shares one of its host's networks.

    Links are numbered: those that go out of ranks and into them, then those of the interfaces.
    """

    def __init__(self, hosts: int, network: str) -> None:
        gbs, per_host = NETWORKS[network]
        self.ranks = hosts * GPUS
        self._sharing = GPUS // per_host  # ranks that share an interface
        self._interfaces = hosts * per_host
        self.gbs = np.repeat([NVLINK_GBS, gbs], [2 * self.ranks, 2 * self._interfaces])

    def of(self, holders: Any, readers: Any) -> Any:
        """Return the two links of each read; shape (reads, 2)."""
        within = np.stack([holders, self.ranks + readers], axis=1)
        ends = np.stack([holders, readers + self._interfaces * self._sharing], axis=1)
        is_near = holders // GPUS == readers // GPUS
        return np.where(is_near[:, None], within, 2 * self.ranks + ends // self._sharing)

    def bound_s(self) -> float:
        """Return the least time for a region of 1 GB from each rank to each other one."""
        holders, readers = np.divmod(np.arange(self.ranks**2), self.ranks)
        used = self.of(holders, readers)[holders != readers]
        return float((np.bincount(used.ravel(), minlength=len(self.gbs)) / self.gbs).max())

    def shares_gbs(self, used: Any) -> Any:
        """Return what each read gets of the links that it uses, max-min fair; shape (reads,)."""
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


def queues(order: str, reader: int, ranks: int, beside: bool) -> list[deque[int]]:
    """Return what a reader reads one after the other, each queue beside the others."""
    ranked = ORDERS[order](reader, ranks)
    if not beside:
        return [deque(ranked)]
    near = [rank for rank in ranked if is_near(rank, reader)]
    return [deque(rank for rank in ranked if not is_near(rank, reader)), deque(near)]


def is_near(holder: int, reader: int) -> bool:
    """Tell whether two ranks are on one host."""
    return holder // GPUS == reader // GPUS


def simulated(network: str, hosts: int, order: str, beside: bool, late: float) -> Found:
    """Return how long a transpose takes in which each rank reads 1 GB from each other one."""
    links = Links(hosts, network)
    ranks, bound_s = links.ranks, links.bound_s()
    grain_s = GRAIN / max(links.gbs[2 * ranks :])
    slots = [
        (rank, queue)
        for rank in range(ranks)
        for queue in queues(order, rank, ranks, beside)
        for _ in range(OPEN_READS)
    ]
    readers = np.array([rank for rank, _ in slots])
    of_queue: defaultdict[int, list[int]] = defaultdict(list)
    for slot, (_, queue) in enumerate(slots):
        of_queue[id(queue)].append(slot)
    # When each slot takes its next source; none is late by more than the share.
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
            return Found(network, hosts, order, beside, late, time_s / bound_s)
        step_s = next_s - time_s
        if len(reading):
            gbs = links.shares_gbs(links.of(holders[reading], readers[reading]))
            step_s = min(step_s, max((left_gb[reading] / gbs).min(), grain_s))
            # What a step takes off too much is taken off the slot's next source, within reason.
            left_gb[reading] -= gbs * step_s
        time_s += step_s
        done = reading[left_gb[reading] <= 1e-9]
        holders[done], due_s[done] = -1, time_s


@click.command()
@click.option("--hosts", multiple=True, type=int, default=HOSTS, show_default=True)
@click.option("--network", "networks", multiple=True, type=click.Choice(list(NETWORKS)))
@click.option("--late", multiple=True, type=float, default=(0.0, 0.1), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    hosts: tuple[int, ...], networks: tuple[str, ...], late: tuple[float, ...], path: Path | None
) -> None:
    """Compare orders on hosts of 8 GPUs, without data and without a cluster."""
    found = []
    cases = product(networks or NETWORKS, hosts, late, (False, True))
    for network, count, share, beside in cases:
        row = [simulated(network, count, order, beside, share) for order in ORDERS]
        found += row
        print(
            f"{network:<20} {count:>3} hosts, last reader {share:.0%} late, within the host "
            f"{'beside' if beside else 'in turn'}: "
            + ", ".join(f"{each.order} {each.bounds:.3f}" for each in row),
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
        rows = [asdict(each) for each in found]
        path.write_text(json.dumps({**assumed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
