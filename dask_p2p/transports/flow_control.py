"""How a reader asks for regions, and how much memory that takes. Pure arithmetic.

Besides its inputs and its output, a task holds parts of regions that are on their way. These stay
below `Options.staging_limit_bytes`: parts are cut to fit. This module has what transports share.
Each transport states what it holds itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from dask_p2p.backends import MOST_UNREAD, backend_named
from dask_p2p.transports.buffers import buffer_bytes
from dask_p2p.types import Kind

__all__ = ["FlowControl", "Pace", "PackingLimits", "buffered_flow", "part_that_fits", "parts_held"]

_MOST_SMALL = 16  # parts in flight, of those smaller than they might be
# Shares of the deadline, after which an answer is late, and before which it is early.
_LATE, _EARLY = 1 / 4, 1 / 16
_SMALLEST_BYTES = 2**16  # of a late answer: less makes nothing quicker
_UNLIMITED_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class FlowControl:
    """How a reader asks for regions."""

    part_bytes: int | None  # at most so many in one request; None: any number
    parts_in_flight: int  # requests under way while the part before them is put into place

    def for_regions(self, largest_bytes: int) -> FlowControl:
        """Return the same for regions of at most so many bytes.

        Of regions that are smaller than a part, more are in flight, up to the same size in all: an
        answer takes its time, however small it is.
        """
        if not self.part_bytes or not self.parts_in_flight:
            return self
        in_flight_bytes = self.parts_in_flight * self.part_bytes
        as_many = in_flight_bytes // buffer_bytes(min(largest_bytes, self.part_bytes))
        return replace(self, parts_in_flight=max(self.parts_in_flight, min(as_many, _MOST_SMALL)))


class Pace:
    """How much to ask of one holder at once, so that answers come well before the deadline.

    Many readers may share a link that carries little. Nobody knows before, so what was asked and
    came late, or not at all, is asked in smaller parts from then on.

    Attributes
    ----------
    most_bytes : int
        Of one answer.
    """

    def __init__(self) -> None:
        self.most_bytes = _UNLIMITED_BYTES

    def note(self, asked_bytes: int, took_s: float, limit_s: float) -> None:
        """Note how long an answer took, or that there was none within the limit."""
        share = took_s / limit_s
        if share > _LATE:
            least_bytes = min(self.most_bytes, max(asked_bytes, _SMALLEST_BYTES))
            self.most_bytes = max(_SMALLEST_BYTES, least_bytes // 4)
        elif share < _EARLY:
            self.most_bytes = min(_UNLIMITED_BYTES, max(self.most_bytes, 2 * asked_bytes))


class PackingLimits(NamedTuple):
    """What a holder packs at most: for each task that reads from it, and of each region."""

    task_bytes: int
    copies: int


def part_that_fits(part_bytes: int, most_bytes: int) -> int:
    """Return a part's size, or where its buffer is larger than that, the power of two below.

    >>> part_that_fits(3000, 4096), part_that_fits(5000, 4097)
    (3000, 4096)
    """
    if buffer_bytes(part_bytes) > most_bytes:
        return 1 << (most_bytes.bit_length() - 1)
    return part_bytes


def buffered_flow(
    part_bytes: int, in_flight: int, left_bytes: int, held: Callable[[int], int]
) -> FlowControl:
    """Return parts of a size, or the largest for which there is room.

    Parameters
    ----------
    part_bytes
        As configured. Each goes through buffers, whose sizes are powers of two.
    in_flight
        As configured; one after another if there is no room for that many of the smallest.
    left_bytes
        What all may take.
    held
        Returns how many there are at a time with so many in flight.
    """
    smallest_bytes = buffer_bytes(1)
    if left_bytes // held(in_flight) < smallest_bytes:
        in_flight = 0
    most_bytes = max(smallest_bytes, left_bytes // held(in_flight))
    return FlowControl(part_that_fits(part_bytes, most_bytes), in_flight)


def parts_held(in_flight: int, kind: Kind) -> int:
    """Return how many parts a task holds at a time: those in flight, and those being placed."""
    return in_flight + 1 + (MOST_UNREAD if backend_named(kind).on_device else 0)
