"""What a live page shows, and how it comes to the scheduler: asked for while somebody looks.

Nothing here needs bokeh. Any number of pages share one feed, and each of its pictures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from dask_p2p.monitoring.picture import Picture, Tasks, picture
from dask_p2p.monitoring.records import Record, RecordStore

__all__ = ["INTERVAL_S", "Feed", "Page"]

logger = logging.getLogger(__name__)

#: Between two rounds of questions, where they take less than that.
INTERVAL_S = 0.5
_PATIENCE_S = 0.2  # that a page waits for workers; what they answer later is in the next picture
_S_PER_WORKER = 2e-3  # between two rounds: asking one takes the scheduler about a quarter of that
_SIZE = 10_000  # records and their stages in a picture


class Page(Protocol):
    """One that shows what there is."""

    @property
    def is_open(self) -> bool:
        """Whether somebody can see it."""

    def show(self, picture: Picture) -> None:
        """Show another picture."""


class Feed:
    """Asks the workers twice a second while somebody looks, and not at all otherwise.

    Everything runs on the scheduler's event loop.

    Parameters
    ----------
    records
        Where the scheduler keeps what workers have told.
    workers
        Returns the addresses of those that may be asked.
    ask
        Brings a worker's new records to `records`, and calls `tell`.
    tasks
        Returns the tasks of an output array, by its name.
    """

    def __init__(
        self,
        records: RecordStore,
        workers: Callable[[], Iterable[str]],
        ask: Callable[[str], Awaitable[Any]],
        tasks: Callable[[str], Tasks],
    ) -> None:
        self._under_way: dict[str, list[Record]] = {}
        self._records = records
        self._workers, self._ask, self._tasks = workers, ask, tasks
        self._pages: set[Page] = set()
        self._asked: dict[str, asyncio.Future[Any]] = {}  # that have not answered
        self._looking: asyncio.Future[None] | None = None
        self._inputs: Any = None  # of the newest picture
        self._picture = picture([])

    @property
    def is_running(self) -> bool:
        """Whether workers are being asked, or will be once a page is seen."""
        return self._looking is not None and not self._looking.done()

    def watch(self, page: Page) -> None:
        """Have a page that is open shown what there is, until `unwatch`."""
        self._pages.add(page)
        if not self.is_running:
            self._looking = asyncio.ensure_future(self._look())

    def unwatch(self, page: Page) -> None:
        """Forget a page that was closed."""
        self._pages.discard(page)
        if not self._pages:
            self.close()

    def close(self) -> None:
        """Ask no more."""
        for waiting in [self._looking, *self._asked.values()]:
            if waiting is not None:
                waiting.cancel()
        self._looking = None
        self._asked.clear()
        self._under_way.clear()

    def tell(self, worker: str, under_way: list[Record]) -> None:
        """Note the tasks that a worker has under way; without a page that is forgotten."""
        if self.is_running:
            self._under_way[worker] = under_way

    def forget(self, worker: str) -> None:
        """Forget a worker that has left; its records stay."""
        self._under_way.pop(worker, None)
        if asked := self._asked.pop(worker, None):
            asked.cancel()

    def picture(self) -> Picture:
        """Return what there is to show: the same object as before where nothing has changed."""
        count, records = self._records.count, self._records.newest(_SIZE)
        under_way = [record for some in self._under_way.values() for record in some]
        names = {record.name for record in [*records[-1:], *under_way]} | self._picture.running
        tasks = {name: self._tasks(name) for name in names}
        workers = sorted(self._workers())
        inputs = count, under_way, tasks, workers
        if inputs != self._inputs:
            self._inputs = inputs
            is_cut = len(records) < count
            self._picture = picture([*records, *under_way], workers, tasks, is_cut=is_cut)
        return self._picture

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            try:
                await self._look_once()
            except Exception:
                logger.exception("the pages of dask_p2p on the dashboard stand still")
                raise
            pause_s = max(INTERVAL_S, _S_PER_WORKER * len([*self._workers()]))
            await asyncio.sleep(max(_PATIENCE_S, pause_s - (loop.time() - begun_s)))

    async def _look_once(self) -> None:
        if not any(page.is_open for page in self._pages):
            return
        await self._ask_all()
        now = self.picture()
        for page in tuple(self._pages):
            if page.is_open:
                page.show(now)

    async def _ask_all(self) -> None:
        """Ask all but those that owe an answer: one that stands still must not keep the others."""
        for worker in self._workers():
            if worker not in self._asked:
                self._asked[worker] = asyncio.ensure_future(self._ask_one(worker))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=_PATIENCE_S)

    async def _ask_one(self, worker: str) -> None:
        try:
            await self._ask(worker)
        except Exception:  # the page goes on with what the others tell
            logger.debug("no answer of %s for the dashboard", worker, exc_info=True)
        finally:
            self._asked.pop(worker, None)
