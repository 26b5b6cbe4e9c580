"""The scheduler plugin: makes every worker take part.

It puts the worker plugin on all workers, and on those that join later. It waits for none of them: a
worker that hangs gets the plugin as soon as it continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import deserialize
from distributed.protocol.pickle import dumps

from dask_p2p.config import options
from dask_p2p.errors import P2PWarning, RegistrationError
from dask_p2p.low_latency import SchedulerLatency
from dask_p2p.monitoring.counters import COUNTERS_METRIC, GAUGES, Totals, Values, sum_into
from dask_p2p.monitoring.feed import Feed
from dask_p2p.monitoring.pages import add_pages
from dask_p2p.monitoring.picture import Tasks
from dask_p2p.monitoring.prometheus import conceal, expose
from dask_p2p.monitoring.records import RECORDS_OP, RecordStore, packed, unpacked
from dask_p2p.monitoring.run_log import log_runs
from dask_p2p.monitoring.runs import runs_of
from dask_p2p.placement import overlay_memory_check, overlay_placement
from dask_p2p.task import PLUGIN_NAME, warn_client
from dask_p2p.versioned import check_dask, this_version, versioned
from dask_p2p.worker import P2PPlugin, meet, set_up

__all__ = ["ANSWER_S", "P2PSchedulerPlugin"]

logger = logging.getLogger(__name__)

#: How long a registration waits for a worker.
ANSWER_S = 10.0
_RETRY_S = 1.0
_LEFT = ("waiting", "no-worker", "queued", "processing")  # states of tasks that have still to end


@dataclass
class _SetUp:
    """The plugin on its way to one worker."""

    since_s: float  # by the monotonic clock
    task: asyncio.Task[None]


@versioned(strict=True)
class P2PSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Puts the worker plugin on all workers, and has Dask's scheduler let its tasks through."""

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self._set_ups: dict[str, _SetUp] = {}  # by the worker's address
        self._failed: dict[str, str] = {}  # why a worker cannot take part, by its address
        self._meetings: set[asyncio.Future[None]] = set()
        self._records = RecordStore()
        self.feed = Feed(self._records, self._ready, self._fetch, self._tasks)
        self._totals = Totals()
        self._states: dict[str, Any] = {}  # of workers, by address, as Dask has them

    async def start(self, scheduler: Any) -> None:
        """Begin. Nothing is awaited here: a second client would begin once more in the meantime."""
        check_dask()
        self._scheduler = scheduler
        scheduler.handlers["p2p_register"] = self.register
        scheduler.handlers[RECORDS_OP] = self.records
        expose(scheduler, "scheduler", self.figures)
        if options().low_latency:
            latency = SchedulerLatency()
            scheduler.add_plugin(latency, name=latency.name, idempotent=True)
            await latency.start(scheduler)  # which waits for nothing either
        if not overlay_placement(scheduler, self._is_registered):
            logger.warning("this release of Dask places tasks in another way: more may be moved")
        if overlay_memory_check(scheduler, self._is_registered, self._obstacle) is None:
            text = (
                "dask_p2p: this release of Dask checks memory in another way, and may refuse "
                "transposes of arrays larger than one worker's memory. Install the release that "
                "dask_p2p asks for."
            )
            logger.warning(text)
            warn_client(scheduler, text, P2PWarning)
        self._tell_all()
        add_pages(scheduler, lambda: getattr(scheduler.plugins.get(PLUGIN_NAME), "feed", None))
        if options().log_runs:
            runs = log_runs(self._records, self._fetch_all, self._is_registered)
            self._meetings.add(asyncio.ensure_future(runs))

    async def close(self) -> None:
        """End with the scheduler."""
        self.feed.close()
        conceal(self._scheduler)
        for task in [*self._meetings, *(each.task for each in self._set_ups.values())]:
            task.cancel()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """See that a worker that joins has the plugin."""
        if PLUGIN_NAME in scheduler.worker_plugins:
            self._tell(worker)

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """Forget a worker that leaves."""
        self._failed.pop(worker, None)
        self._records.forget(worker)
        self.feed.forget(worker)
        if (state := self._states.pop(worker, None)) is not None:
            self._note(worker, state)
            self._totals.end(worker)
        if set_up := self._set_ups.pop(worker, None):
            set_up.task.cancel()

    async def register(self) -> dict[str, Any]:
        """Put the plugin on all workers; answer when they have it, or `ANSWER_S` have passed.

        Returns
        -------
        dict
            ``failed``: why a worker cannot take part, by address; ``silent``: addresses of those
            that have not answered.
        """
        self._tell_all()
        now_s = time.monotonic()
        waiting = [
            asyncio.wait([each.task], timeout=max(0.0, each.since_s + ANSWER_S - now_s))
            for each in self._set_ups.values()
        ]
        await asyncio.gather(*waiting)
        silent = [worker for worker, each in self._set_ups.items() if not each.task.done()]
        ready = set(self._set_ups) - {*silent, *self._failed}
        meeting = asyncio.ensure_future(self._meet(sorted(ready)))
        self._meetings.add(meeting)  # the loop itself keeps only a weak reference
        meeting.add_done_callback(self._meetings.discard)
        return {"failed": dict(self._failed), "silent": silent}

    async def records(
        self, name: str | None = None, since_s: float = 0.0, n: int | None = None
    ) -> dict[str, Any]:
        """Ask the workers for what is new, and answer with the newest runs.

        Parameters
        ----------
        name
            Of an output array, to get its records only.
        since_s
            Seconds since the epoch; what began before is left out.
        n
            Runs, at most; by default all.

        Returns
        -------
        dict
            ``records``: what `packed` made of them; ``silent``: addresses of workers that did
            not answer.
        """
        silent = await self._fetch_all()
        wanted = [r for r in self._records if name in (None, r.name) and r.start_s >= since_s]
        if n is not None:
            wanted = [record for run in runs_of(wanted)[:n] for record in run.records]
        return {"records": packed(wanted), "silent": silent}

    async def _fetch_all(self) -> list[str]:
        """Bring all workers' new records here; return the addresses of those that are silent."""
        ready = self._ready()
        answered = await asyncio.gather(*map(self._fetch, ready))
        return [worker for worker, there in zip(ready, answered, strict=True) if not there]

    def _ready(self) -> list[str]:
        """Return the workers that have the plugin; none once this one was taken off."""
        if not self._is_registered():
            return []
        return [
            worker
            for worker, each in self._set_ups.items()
            if each.task.done() and worker not in self._failed
        ]

    def _tasks(self, name: str) -> Tasks:
        """Return the tasks of an output array that the scheduler has."""
        group = self._scheduler.task_groups.get(name)
        states = group.states if group is not None else {}
        left = sum(states.get(state, 0) for state in _LEFT)
        return Tasks(sum(states.values()) - states.get("forgotten", 0), left)

    async def _fetch(self, worker: str) -> bool:
        """Bring a worker's new records here; return whether it answered."""
        call = getattr(self._scheduler.rpc(worker), RECORDS_OP)
        try:
            answer = await asyncio.wait_for(call(since=self._records.next(worker)), ANSWER_S)
        except (OSError, TimeoutError):
            return worker not in self._scheduler.workers  # one that left has nothing to tell
        if answer is not None:  # as of a worker whose plugin was taken off
            self._records.add(worker, answer["first"], unpacked(answer["records"]))
            self.feed.tell(worker, unpacked(answer["under_way"]))
        return True

    def figures(self) -> Values:
        """Return what all workers have done so far, as their last heartbeats tell it.

        Nothing once the plugin was taken off, of which Dask does not tell it.
        """
        if not self._is_registered():
            return {}
        gauges: Values = {family.name: defaultdict(int) for family in GAUGES}
        for worker, state in self._states.items():
            sum_into(gauges, self._note(worker, state))
        return {**self._totals.values(), **gauges}

    def _note(self, worker: str, state: Any) -> Values:
        values: Values = state.metrics.get(COUNTERS_METRIC) or {}
        self._totals.note(worker, values)
        return values

    def _is_registered(self) -> bool:
        return self._scheduler.plugins.get(PLUGIN_NAME) is self

    def _obstacle(self, worker: str) -> Exception | None:
        if worker not in self._failed:
            return None
        return RegistrationError(cannot_take_part({worker: self._failed[worker]}))

    def _tell_all(self) -> None:
        self._scheduler.worker_plugins[PLUGIN_NAME] = dumps(P2PPlugin())
        for worker in self._scheduler.workers:
            self._tell(worker)

    def _tell(self, worker: str) -> None:
        """Start to set a worker up, unless that has started and not ended."""
        self._states[worker] = self._scheduler.workers[worker]
        if worker not in self._set_ups or self._set_ups[worker].task.done():
            task = asyncio.ensure_future(self._set_up(worker))
            self._set_ups[worker] = _SetUp(time.monotonic(), task)

    async def _set_up(self, worker: str) -> None:
        """Put the plugin on a worker, however long it stands still."""
        request = {"function": dumps(set_up), "args": dumps((P2PPlugin(),))}
        while worker in self._scheduler.workers:
            try:
                reply = await self._scheduler.rpc(worker).run(**request)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            except Exception as exc:  # it cannot read the request
                version = await installed_version(self._scheduler.rpc(worker).run)
                self._failed[worker] = f"{version} ({exc})"
                return
            if reply["status"] == "OK":
                self._failed.pop(worker, None)
            else:
                self._failed[worker] = reply["exception_text"]
            return

    async def _meet(self, workers: list[str]) -> None:
        request = {"op": "run", "function": dumps(meet), "args": dumps((workers,))}
        await self._scheduler.broadcast(msg=request, workers=workers, on_error="ignore")


def cannot_take_part(failed: dict[str, str]) -> str:
    """Say which workers cannot take part, and why."""
    causes = "; ".join(f"worker {worker}: {cause}" for worker, cause in sorted(failed.items()))
    return (
        f"expected {this_version()} on every worker, got {causes}. "
        f"Install the same version everywhere, or close the workers that do without."
    )


async def installed_version(run: Any) -> str:
    """Ask a process of the cluster, by its ``run``, which version of the package it has."""
    try:
        reply = await run(function=dumps(metadata.version), args=dumps(("dask-p2p",)))
        version = reply["result"]  # which a scheduler does not read by itself
        if not isinstance(version, str):
            version = deserialize(version.header, version.frames)
        return f"dask_p2p {version}"
    except Exception:
        return "no dask_p2p"
