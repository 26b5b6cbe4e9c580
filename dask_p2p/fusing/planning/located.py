"""The owner of each input that lies in the memory of a worker: a rank that will run on this worker.

So Dask's worker fetches no block for a rank, and keeps none until the gang ends. The owner sends
the block in the first superstep that reads it, and its receiver drops it after the last use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dask_p2p.types import Key


@dataclass(frozen=True)
class Locations:
    """The workers that have the inputs of a graph."""

    holders: Mapping[Key, Collection[str]] = field(default_factory=dict)  # addresses, by input
    workers: int = 1  # number of the cluster's workers


UNKNOWN = Locations()


def located_owners(locations: Locations, preferred: Mapping[Key, int], size: int) -> dict[Key, int]:
    """Return the owner of each input that lies on a worker with a rank.

    `preferred` has the rank that reads most of each input. It owns the input if it runs on one of
    its workers. Inputs on other workers are left out.
    """
    held = {key: sorted(locations.holders.get(key, ())) for key in preferred}
    ranks_of = _ranks_of(held, preferred, size, max(1, size // locations.workers))
    owned = Counter[int]()
    owners = {}
    for key, workers in held.items():
        ranks = [rank for worker in workers for rank in ranks_of.get(worker, ())]
        if ranks:
            owner = min(ranks, key=lambda rank: (rank != preferred[key], owned[rank]))
            owners[key] = owner
            owned[owner] += 1
    return owners


def _ranks_of(
    held: Mapping[Key, Collection[str]], preferred: Mapping[Key, int], size: int, most: int
) -> Mapping[str, list[int]]:
    """Return the ranks that will run on each worker, at most `most`.

    Dask's scheduler places a rank where most bytes of its inputs are. So the pairs of a worker and
    a rank with the most inputs come first. A worker that is left gets a rank that is left.
    """
    pairs = Counter((worker, preferred[key]) for key in held for worker in held[key])
    ranks_of, free = defaultdict[str, list[int]](list), dict.fromkeys(range(size))
    for worker, rank in sorted(pairs, key=lambda pair: (-pairs[pair], pair[1], pair[0])):
        if rank in free and len(ranks_of[worker]) < most:
            ranks_of[worker].append(rank)
            del free[rank]
    for worker in sorted({worker for worker, _ in pairs} - {w for w in ranks_of if ranks_of[w]}):
        if free:
            ranks_of[worker].append(free.popitem()[0])
    return ranks_of
