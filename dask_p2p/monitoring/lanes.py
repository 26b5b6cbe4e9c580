"""What overlaps in time, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["in_lanes"]


class _Timed(Protocol):
    @property
    def start_s(self) -> float: ...
    @property
    def stop_s(self) -> float: ...


_T = TypeVar("_T", bound=_Timed)


def in_lanes(timed: Iterable[_T]) -> list[list[_T]]:
    """Return records, or other things with a start and a stop, in lists without an overlap.

    Each list is in the order of time, and there are as few of them as possible.
    """
    lanes: list[list[_T]] = []
    for one in sorted(timed, key=lambda one: (one.start_s, one.stop_s)):
        lane = next((lane for lane in lanes if lane[-1].stop_s <= one.start_s), None)
        if lane is None:
            lanes.append([one])
        else:
            lane.append(one)
    return lanes
