"""In which order the members of a gang exchange messages: by stages, in which each has one partner.

Five members; in a stage member 0 sends to the first number, and receives from the second::

    diagonal      1<4   2<3   3<2   4<1            to those after it, from those before it
    left-right    1<4   4<1   2<3   3<2            to the right, to the left, further right, ...
    pairwise       -    1<1   2<2   3<3   4<4      both ways with one; of an odd number one rests

Left-right uses each link one way at a time, which was better where links of one direction share a
cable; pairwise keeps two members busy with each other.
"""

from __future__ import annotations

from typing import NamedTuple

#: Of messages. In "auto" all go at the same time, as sockets take them.
ORDERS = ("auto", "diagonal", "left-right", "pairwise")

_WIDTH = 8  # of a tree: how many are below one


class Partners(NamedTuple):
    """What a member does in one stage: None for nothing."""

    to: int | None  # the member to which it sends
    source: int | None  # the member from which it receives


def partners(
    order: str,  # one of `ORDERS`, but "auto"
    rank: int,  # which member it is
    size: int,  # of how many
) -> list[Partners]:
    """Return the partners of a member, stage by stage: each other member once, either way.

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


def branch(rank: int, size: int) -> tuple[list[int], list[int], list[int]]:
    """Return a member's place in a tree of all: those above and below it, by links of its own.

    The last ones are those below it that have others below them in turn.

    Examples
    --------
    >>> branch(0, 12)
    ([], [1, 2, 3, 4, 5, 6, 7, 8], [1])
    >>> branch(9, 12)
    ([1], [], [])
    """
    below = list(range(rank * _WIDTH + 1, min(size, rank * _WIDTH + 1 + _WIDTH)))
    above = [(rank - 1) // _WIDTH] if rank else []
    return above, below, [each for each in below if each * _WIDTH + 1 < size]


def _opponents(rank: int, size: int) -> list[int | None]:
    """Return whom a player meets in each round of a tournament; None for a round of rest.

    All but the last of an even number sit in a ring: those meet whose numbers add up to that of the
    round. The one that would meet itself meets the last, or rests.
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
