"""Numbers of ranks that can run at the same time: by threads, and by units of resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

_ROUNDING = 1e-9  # of units that are fractions, like 0.1


def room(units: Mapping[str, float], needs: Mapping[str, float]) -> float:
    """Return how many ranks with these needs a worker with these units can run at a time.

    >>> room({"GPU": 2, "memory": 10}, {"GPU": 1, "memory": 8})
    1
    """
    counts = [int(units.get(name, 0) / n + _ROUNDING) for name, n in needs.items() if n > 0]
    return min(counts, default=inf)


def ranks_for(threads: Sequence[int], size_bytes: int, least_bytes: int) -> int:
    """Return the number of ranks for an array, on workers with these numbers of threads.

    Each worker runs at least one rank, and at most one in each thread. It runs several ranks only
    if each of them gets `least_bytes` of the array.

    >>> [ranks_for([4, 4], mib << 20, 1 << 20) for mib in (1, 4, 100)]
    [2, 4, 8]
    """
    each = size_bytes // (least_bytes * max(1, len(threads)))
    return max(1, sum(max(1, min(count, each)) for count in threads))


def most_seated(wants: Mapping[frozenset[str], int], rooms: Mapping[str, float]) -> int:
    """Return how many ranks find room, if they are placed as well as possible.

    `wants` has the number of ranks by the workers that may run them, `rooms` the ranks that each
    worker can run.

    >>> most_seated({frozenset("ab"): 1, frozenset("a"): 1}, {"a": 1, "b": 1})
    2
    """
    free = {worker: rooms[worker] for workers in wants for worker in workers}
    taken: dict[frozenset[str], Counter[str]] = {workers: Counter() for workers in wants}
    seated = 0
    for workers, count in wants.items():
        for worker in workers:  # most find room without a move
            here = max(0, int(min(free[worker], count)))
            free[worker] -= here
            taken[workers][worker] += here
            count -= here
            seated += here
        while count and _moved(workers, free, taken):
            count -= 1
            seated += 1
    return seated


def _moved(
    workers: frozenset[str], free: dict[str, float], taken: dict[frozenset[str], Counter[str]]
) -> bool:
    """Seat one more rank, by moving ranks that others workers may run, too."""
    came: dict[frozenset[str], tuple[frozenset[str], str] | None] = {workers: None}
    queue, seen = [workers], set[str]()
    for group in queue:
        for worker in group - seen:
            seen.add(worker)
            if free[worker] > 0:
                free[worker] -= 1
                _move(group, worker, came, taken)
                return True
            for other, seats in taken.items():
                if other not in came and seats[worker] > 0:
                    came[other] = group, worker
                    queue.append(other)
    return False


def _move(
    group: frozenset[str],
    worker: str,
    came: Mapping[frozenset[str], tuple[frozenset[str], str] | None],
    taken: Mapping[frozenset[str], Counter[str]],
) -> None:
    """Seat a rank of each group on the way where one of the next has left."""
    while True:
        taken[group][worker] += 1
        if (step := came[group]) is None:
            return
        before, left = step
        taken[group][left] -= 1
        group, worker = before, left
