"""Message schedules between the ranks of a gang: stages in which each rank has one partner.

Five ranks; in each stage rank 0 sends to the first number, and receives from the second::

    diagonal      1<4   2<3   3<2   4<1            to the next ranks, from the previous ones
    left-right    1<4   4<1   2<3   3<2            to the right, to the left, further right, ...
    pairwise       -    1<1   2<2   3<3   4<4      both ways with one; in odd gangs one rank rests

"left-right" uses each link in one direction at a time, which was better where the links of one
direction share a cable. "pairwise" keeps two ranks busy with each other.
"""

from __future__ import annotations

from typing import NamedTuple

#: Schedules. With "auto" all messages go concurrently, as sockets accept them.
ORDERS = ("auto", "diagonal", "left-right", "pairwise")

_WIDTH = 8  # most children of a rank in the tree


class Partners(NamedTuple):
    """The partners of a rank in one stage; None in a stage of rest."""

    to: int | None  # destination rank
    source: int | None  # source rank


def partners(
    order: str,  # one of `ORDERS` except "auto"
    rank: int,
    size: int,  # number of ranks
) -> list[Partners]:
    """Return a rank's partners, stage by stage: each other rank once in either direction.

    Examples
    --------
    >>> partners("left-right", 0, 4)
    [Partners(to=1, source=3), Partners(to=3, source=1), Partners(to=2, source=2)]
    >>> [stage.to for stage in partners("pairwise", 0, 4)]
    [3, 1, 2]
    """
    if order == "pairwise":
        return [Partners(other, other) for other in _opponents(rank, size)]
    far = list(range(1, size))
    if order == "left-right":
        far.sort(key=lambda by: (min(by, size - by), by))
    return [Partners((rank + by) % size, (rank - by) % size) for by in far]


def branch(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the parent and the children of a rank in a tree of all ranks. The root has no parent.

    Examples
    --------
    >>> branch(0, 12)
    ([], [1, 2, 3, 4, 5, 6, 7, 8])
    >>> branch(9, 12)
    ([1], [])
    """
    below = list(range(rank * _WIDTH + 1, min(size, rank * _WIDTH + 1 + _WIDTH)))
    above = [(rank - 1) // _WIDTH] if rank else []
    return above, below


def _opponents(rank: int, size: int) -> list[int | None]:
    """Return a player's opponents in each round of a round-robin tournament; None: rest.

    All players, except the last of an even number, form a ring. In each round two of them are
    opponents if their numbers add up to the round's number. The one left plays the last, or rests.
    """
    ring = size - 1 + size % 2
    found: list[int | None] = []
    for number in range(ring if size > 1 else 0):
        if rank == ring:
            other = next(each for each in range(ring) if 2 * each % ring == number)
        else:
            other = (number - rank) % ring
            other = ring if other == rank else other
        found.append(other if other < size else None)
    return found
