"""Steps of running gangs in the bars of Dask's own `progress`.

Such a bar counts tasks, and those of a gang all finish at its end. So each bar with the tasks of a
running gang gets *marks*: additional keys that count as finished in proportion to the gang's steps.
They are in the bar alone, not in the scheduler. When the gang no longer runs, all of its marks
count as finished, so a bar never waits for a mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from distributed.diagnostics.progress import MultiProgress, Progress

from dask_p2p.plugins.gangs.coordinator import Coordinator

MARKS = 100  # of a gang in a bar
_EVERY_S = 0.5

#: Returns the records of a worker's running tasks.
UnderWay = Callable[[str], Awaitable[Iterable[Any] | None]]


class Bars:
    """Moves the bars that count tasks of running gangs."""

    def __init__(self, scheduler: Any, coordinator: Coordinator, under_way: UnderWay) -> None:
        self._scheduler, self._coordinator, self._under_way = scheduler, coordinator, under_way
        self._moving: asyncio.Future[None] | None = None
        self._marked = set[str]()  # gangs with marks in bars

    def watch(self) -> None:
        """Move bars while gangs run."""
        if (self._moving is None or self._moving.done()) and self._coordinator.running():
            self._moving = asyncio.ensure_future(self._move_all())

    def finish(self, gang: str) -> None:
        """Count all marks of a gang as finished."""
        if gang in self._marked:
            self._marked.discard(gang)
            for bar, _, left in self._bars_of(gang):
                left -= _marks(gang)
                if bar.status is None and not _left(bar):
                    bar.stop()

    def close(self) -> None:
        """Finish all marks, and move no bar any more."""
        if self._moving is not None:
            self._moving.cancel()
        for gang in tuple(self._marked):
            self.finish(gang)

    async def _move_all(self) -> None:
        while running := self._coordinator.running():
            for gang, workers in running.items():
                if any(self._bars_of(gang)):
                    await self._move(gang, workers)
            for gang in self._marked - self._coordinator.running().keys():
                self.finish(gang)
            await asyncio.sleep(_EVERY_S)
        for gang in tuple(self._marked):
            self.finish(gang)

    async def _move(self, gang: str, workers: Iterable[str]) -> None:
        """Set the marks of a gang to its steps, if it has a number of steps."""
        answers = await asyncio.gather(*map(self._under_way, workers))
        records = [each for found in answers for each in found or () if each.key[0] == gang]
        done = min((each.step / each.steps for each in records if each.steps), default=None)
        if done is None or gang not in self._coordinator.running():
            return
        marks = _marks(gang)
        finished = _marks(gang, int(min(done, 1.0) * MARKS))
        for _, every, left in self._bars_of(gang):
            self._marked.add(gang)
            every |= marks
            left -= finished
            left |= marks - finished

    def _bars_of(self, gang: str) -> Iterator[tuple[Progress, set[Any], set[Any]]]:
        """Yield the bars with tasks of a gang: all keys of its group, and unfinished ones."""
        for bar in tuple(self._scheduler.plugins.values()):
            if not isinstance(bar, Progress) or bar.keys is None:
                continue
            every, left = bar.all_keys, bar.keys
            if isinstance(bar, MultiProgress):
                with suppress(Exception):  # the user's function groups keys
                    group = bar.func((gang, 0))
                    every, left = bar.all_keys.get(group, ()), bar.keys.get(group, ())
            if isinstance(every, set) and isinstance(left, set) and (gang, 0) in every:
                yield bar, every, left


def _marks(gang: str, count: int = MARKS) -> set[Any]:
    return {(gang, "step", number) for number in range(count)}


def _left(bar: Progress) -> bool:
    """Return whether a bar has unfinished keys."""
    return any(bar.keys.values()) if isinstance(bar, MultiProgress) else bool(bar.keys)
