"""What of a member's share can be computed before the rims of other members are there.

::

    +---+-----------+---+
    |   |     2     |   |
    |   +-----------+   |
    |   |           |   |
    | 0 | interior  | 1 |    a frame at each side where rims come from others
    |   |           |   |
    |   +-----------+   |
    |   |     3     |   |
    +---+-----------+---+
"""

from __future__ import annotations

from dask_p2p.geometry import Box, box_size
from dask_p2p.plans.rims import Rims

__all__ = ["interior_and_frames"]


def interior_and_frames(rims: Rims) -> list[Box]:
    """Return boxes of a share that cover it once. Only the first needs no rims of other members.

    It may be empty: then there is one frame, the share.
    """
    lengths = [stop - start for start, stop in rims.inner]
    whole = tuple((0, length) for length in lengths)
    needed = _sides(rims)
    inside = []
    for axis, (length, (before, after)) in enumerate(zip(lengths, rims.depth, strict=True)):
        start = before if (axis, False) in needed else 0
        stop = length - after if (axis, True) in needed else length
        inside.append((start, stop))
    if any(start >= stop for start, stop in inside):
        return [tuple((0, 0) for _ in whole), whole]
    frames = []
    for axis, (start, stop) in enumerate(inside):
        for low, high in ((0, start), (stop, lengths[axis])):
            frames.append((*inside[:axis], (low, high), *whole[axis + 1 :]))
    return [tuple(inside), *(frame for frame in frames if box_size(frame))]


def _sides(rims: Rims) -> set[tuple[int, bool]]:
    """Return at which sides frames are needed: axes, and whether it is the end."""
    around = []
    for box in (box for boxes in rims.receives.values() for box in boxes):
        along = list(enumerate(zip(box, rims.inner, strict=True)))
        before = [(axis, False) for axis, ((_, stop), (first, _)) in along if stop <= first]
        after = [(axis, True) for axis, ((start, _), (_, last)) in along if start >= last]
        around.append(before + after)
    needed: set[tuple[int, bool]] = set()
    for sides in sorted(around, key=len):
        if not needed & {*sides}:  # corners lie beside frames, mostly
            needed.add(sides[0])
    return needed
