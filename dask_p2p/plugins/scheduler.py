"""The scheduler plugin: installs the worker plugin on every worker, and runs gangs.

The workers include those that join later. The scheduler waits for none of them: a worker that hangs
gets the plugin as soon as it continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, islice
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import deserialize
from distributed.protocol.pickle import dumps

from dask_p2p import tuning
from dask_p2p.engine.task import (
    PLUGIN_NAME,
    RankTask,
    ReferenceTask,
    is_fusable,
    run_name,
    unwrap_task,
)
from dask_p2p.errors import RegistrationError
from dask_p2p.monitoring import add_pages
from dask_p2p.monitoring import metrics as prometheus
from dask_p2p.monitoring.feed import Feed, Tasks
from dask_p2p.monitoring.metrics import COUNTERS_METRIC, GAUGES, Totals, Values, sum_into
from dask_p2p.monitoring.records import (
    PROGRESS_OP,
    RECORDS_OP,
    RecordStore,
    TaskRecord,
    packed,
    unpacked,
)
from dask_p2p.monitoring.runs import runs_of
from dask_p2p.plugins.dask_internals import StreamFlusher
from dask_p2p.plugins.gangs.scheduler import Gangs
from dask_p2p.plugins.placement import overlay_memory_check, overlay_placement
from dask_p2p.plugins.worker import P2PPlugin, probe_peers
from dask_p2p.transports.rpc import Background, rpc_handler
from dask_p2p.versions import check_dask, pickled_plugin, this_version

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_LEFT = ("waiting", "no-worker", "queued", "processing")  # states of unfinished tasks
_ENDED = ("memory", "erred", "forgotten")  # not "released": a released task may run again


@dataclass
class _SetUp:
    """The installation of the plugin on one worker."""

    since_s: float  # start, by the monotonic clock
    task: asyncio.Task[None]
    is_repeated: bool  # since another client registers


class P2PSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Installs the worker plugin on all workers, and changes the scheduler's task placement."""

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self._set_ups: dict[str, _SetUp] = {}  # by worker address
        self._failed: dict[str, str] = {}  # by worker address: cause of the failed installation
        self._background = Background()
        self._records = RecordStore()
        self.feed = Feed(self._records, self.ready, self._fetch_records, self._count_tasks)
        self._totals = Totals()
        self._states: dict[str, Any] = {}  # Dask's worker states, by address
        self._flusher = StreamFlusher()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled_plugin(type(self))

    async def start(self, scheduler: Any) -> None:
        """Start the plugin. No await here: a second client would start it again concurrently."""
        check_dask()
        self.scheduler = scheduler
        scheduler.handlers["p2p_register"] = self.register
        scheduler.handlers |= {RECORDS_OP: self.records, PROGRESS_OP: self.progress}
        prometheus.register(scheduler, "scheduler", self.figures)
        self._overlay()
        self._set_up_all()
        self.gangs = Gangs(scheduler, self._is_registered, self._put_back)
        add_pages(scheduler, lambda: getattr(scheduler.plugins.get(PLUGIN_NAME), "feed", None))

    def _overlay(self) -> None:
        overlay_placement(self.scheduler, self._is_registered)
        overlay_memory_check(self.scheduler, self._is_registered, self._obstacle)

    def _put_back(self) -> None:
        """Add this plugin again if it was removed, unless the scheduler has another one."""
        if PLUGIN_NAME not in self.scheduler.plugins:
            self._overlay()
            self.scheduler.add_plugin(self, name=PLUGIN_NAME)

    async def close(self) -> None:
        self.gangs.close()
        self.feed.close()
        prometheus.unregister(self.scheduler)
        self._background.cancel()
        for set_up in self._set_ups.values():
            set_up.task.cancel()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.gangs.add_worker()
        if PLUGIN_NAME in scheduler.worker_plugins:
            self._begin_set_up(worker)

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self._failed.pop(worker, None)
        self._records.forget(worker)
        self.feed.forget(worker)
        if (state := self._states.pop(worker, None)) is not None:
            self._record(worker, state)
            self._totals.end(worker)
        if set_up := self._set_ups.pop(worker, None):
            set_up.task.cancel()

    def update_graph(self, scheduler: Any, *, tasks: list[Any], **kwargs: Any) -> None:
        """Watch the gangs of a graph, and recognise all tasks of this package."""
        for task in map(scheduler.tasks.__getitem__, tasks):
            task.run_spec = unwrap_task(task.run_spec)
        self.gangs.update_graph(tasks)

    def log_event(self, topic: str, msg: Any) -> None:
        self.gangs.log_event(topic, msg)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Record starts and ends of runs, and flush the streams that idle workers wait for."""
        self.gangs.transition(key, start, finish)
        if finish == "processing":
            task = self.scheduler.tasks[key]
            if _is_ours(task):
                self._records.runs.sent(run_name(key), task.run_id)
            if _is_idle(task.processing_on) and _is_near_ours(task):
                self._flusher.flush(self.scheduler.stream_comms.get(task.processing_on.address))
        elif finish in _ENDED and isinstance(key, tuple):
            name, runs = run_name(key), self._records.runs
            if runs.is_open(name):
                if finish == "erred":
                    runs.set_outcome(name, "failed")
                if not self._count_tasks(key[0]).left:
                    runs.end(name)
        elif finish == "released" and start in _LEFT and isinstance(key, tuple):
            task = self.scheduler.tasks.get(key)
            if task is not None and not task.waiters and not task.who_wants:
                self._records.runs.set_outcome(run_name(key), "cancelled")
        if finish == "memory" and _is_idle(self.scheduler.workers.get(kwargs.get("worker"))):
            task = self.scheduler.tasks[key]
            if task.who_wants and _is_near_ours(task):
                clients = (client.client_key for client in task.who_wants)
                self._flusher.flush(*map(self.scheduler.client_comms.get, clients))

    @rpc_handler
    async def register(self) -> dict[str, Any]:
        """Install the plugin on all workers; return when all have it, or after a limit.

        In the answer, ``failed`` has the cause of each failed installation, by address.
        ``silent`` lists the workers without an answer. ``workers`` is the number of workers.
        """
        self._set_up_all()
        set_ups = dict(self._set_ups)  # a concurrent call begins others
        began_s = time.monotonic() - tuning.current.worker_answer_s
        waiting = [
            asyncio.wait([set_up.task], timeout=max(0.0, set_up.since_s - began_s))
            for set_up in set_ups.values()
        ]
        await asyncio.gather(*waiting)
        silent = [worker for worker, set_up in set_ups.items() if not set_up.task.done()]
        ready = set(self._set_ups) - {*silent, *self._failed}
        request = {"op": "run", "function": dumps(probe_peers), "args": dumps((sorted(ready),))}
        probing = self.scheduler.broadcast(msg=request, workers=sorted(ready), on_error="ignore")
        self._background.start(probing)
        return {"failed": dict(self._failed), "silent": silent, "workers": len(self._set_ups)}

    @rpc_handler
    async def records(self, n: Any = None) -> dict[str, Any]:
        """Fetch new records from the workers, and return those of the newest `n` runs, or all.

        ``records`` are in the form of `packed`; ``silent`` lists workers that did not answer.
        ``tasks`` has the `Tasks` of each array.
        """
        records, silent = await self._fetch_all()
        if n is not None:
            records = [record for run in runs_of(records)[:n] for record in run.records]
        tasks = {name: self._count_tasks(name) for name in {record.name for record in records}}
        return {"records": packed(records), "silent": silent, "tasks": tasks}

    @rpc_handler
    async def progress(self, keys: Any, names: Any) -> dict[str, Any]:
        """Return how far tasks and all that they depend on have come.

        ``keys`` are those of the tasks, of an array's tasks at least one; ``names`` are those of
        an earlier answer. In the answer, ``tasks`` has the numbers of finished tasks and of all
        tasks. ``runs`` has the figures of each array's newest run, the newest first, as
        `Run.summary`, with the number of tasks that are ``left``. ``names`` are those of all
        arrays.
        """
        groups, numbers = self._find_task_groups(keys), Tasks()
        for group in groups:
            total, unfinished = self._count_tasks(group)
            numbers = Tasks(numbers.total + total, numbers.left + unfinished)
        arrays = {*names, *(run_name((group,)) for group in groups)}
        records, _ = await self._fetch_all()
        summaries = []
        for run in runs_of(record for record in records if record.name in arrays):
            unfinished, log = self._count_tasks(run.name).left, self._records.runs
            is_newest = run.records[0].run == log.newest(run.name)
            # Else tasks of a new run are left, and none of them has begun.
            if is_newest and (log.is_open(run.name) or run.under_way or not unfinished):
                summaries.append(run.summary() | {"left": unfinished})
        tasks = numbers.total - numbers.left, numbers.total
        return {"tasks": tasks, "runs": summaries, "names": sorted(arrays)}

    def _find_task_groups(self, keys: Any) -> set[str]:
        """Return the names of the task groups of arrays that tasks with these keys depend on.

        A key that is a text shares its group with unrelated tasks: only its dependencies count.
        """
        groups, stack = set[str](), list[Any]()
        for task in filter(None, map(self.scheduler.tasks.get, keys)):
            stack += (
                [task, *task.dependencies] if isinstance(task.key, tuple) else task.dependencies
            )
        stack = list({task.group.name: task.group for task in stack}.values())
        while stack:
            group = stack.pop()
            if group.name not in groups:
                groups.add(group.name)
                stack += group.dependencies
        return groups

    async def _fetch_all(self) -> tuple[list[TaskRecord], list[str]]:
        ready = self.ready()
        replies = await asyncio.gather(*map(self._fetch_records, ready))
        silent = [worker for worker, reply in zip(ready, replies, strict=True) if reply is None]
        ended = list(self._records)
        # A task may end between the requests to two workers: its last record counts.
        attempts = {(record.key, record.start_s) for record in ended}
        running = (record for reply in replies for record in reply or ())
        return [*ended, *(r for r in running if (r.key, r.start_s) not in attempts)], silent

    def ready(self) -> list[str]:
        """Return the workers that have the plugin; none after this plugin was removed."""
        set_ups = self._set_ups.items() if self._is_registered() else ()
        workers = [name for name, set_up in set_ups if set_up.is_repeated or set_up.task.done()]
        return [worker for worker in workers if worker not in self._failed]

    def _count_tasks(self, name: str) -> Tasks:
        group = self.scheduler.task_groups.get(name)
        states = group.states if group is not None else {}
        unfinished = sum(states.get(state, 0) for state in _LEFT)
        return Tasks(sum(states.values()) - states.get("forgotten", 0), unfinished)

    async def _fetch_records(self, worker: str) -> list[TaskRecord] | None:
        """Fetch a worker's new records; return those of running tasks, None without an answer."""
        asking = getattr(self.scheduler.rpc(worker), RECORDS_OP)(since=self._records.next(worker))
        try:
            reply = await asyncio.wait_for(asking, tuning.current.worker_answer_s)
        except (OSError, TimeoutError):
            # A worker that has left has no records.
            return None if worker in self.scheduler.workers else []
        if reply is not None and reply.get("status", "ok") != "ok":
            logger.warning("worker %s did not return its records: %s", worker, reply)
            return None
        if reply is None:  # from a worker whose plugin was removed
            return []
        records, under_way = map(unpacked, (reply["records"], reply["under_way"]))
        runs = self._records.runs
        self._records.add(worker, reply["first"], runs.assigned(records))
        return runs.with_outcomes(runs.assigned(under_way))

    def figures(self) -> Values:
        """Return the counters and gauges of all workers, as of their last heartbeats.

        Empty after the plugin was removed, since Dask does not notify plugins of their removal.
        """
        if not self._is_registered():
            return {}
        gauges: Values = {family.name: Counter() for family in GAUGES}
        for worker, state in self._states.items():
            sum_into(gauges, self._record(worker, state))
        return {**self._totals.values(), **gauges}

    def _record(self, worker: str, state: Any) -> Values:
        values: Values = state.metrics.get(COUNTERS_METRIC) or {}
        self._totals.record(worker, values)
        return values

    def _is_registered(self) -> bool:
        return self.scheduler.plugins.get(PLUGIN_NAME) is self

    def _obstacle(self, worker: str) -> Exception | None:
        if worker not in self._failed:
            return None
        return RegistrationError(describe_failed_workers({worker: self._failed[worker]}))

    def _set_up_all(self) -> None:
        self.scheduler.worker_plugins[PLUGIN_NAME] = dumps(P2PPlugin())
        for worker in self.scheduler.workers:
            self._begin_set_up(worker)

    def _begin_set_up(self, worker: str) -> None:
        self._states[worker] = self.scheduler.workers[worker]
        set_up = self._set_ups.get(worker)
        if set_up is None or set_up.task.done():
            task = asyncio.ensure_future(self._set_up(worker))
            self._set_ups[worker] = _SetUp(time.monotonic(), task, set_up is not None)

    async def _set_up(self, worker: str) -> None:
        """Install the plugin on a worker, and retry until the worker responds or leaves."""
        request = {"function": dumps(P2PPlugin().add_to)}
        while worker in self.scheduler.workers:
            try:
                reply = await self.scheduler.rpc(worker).run(**request)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            except Exception as exc:  # the worker cannot unpickle the request
                self._failed[worker] = await installed_version(self.scheduler.rpc(worker).run, exc)
                return
            if reply["status"] == "OK":
                self._failed.pop(worker, None)
            else:
                self._failed[worker] = reply["exception_text"]
            return


def _is_ours(task: Any) -> bool:
    return isinstance(task.run_spec, (ReferenceTask, RankTask)) or is_fusable(task.key)


def _is_near_ours(task: Any) -> bool:
    # The first dependency and dependent stand for all, as there may be thousands.
    near = chain([task], islice(task.dependencies, 1), islice(task.dependents, 1))
    return any(map(_is_ours, near))


def _is_idle(worker: Any) -> bool:
    return worker is not None and len(worker.processing) <= worker.nthreads


def describe_failed_workers(failed: dict[str, str]) -> str:
    """Return the error message for workers without the plugin, with the cause of each."""
    causes = "; ".join(f"worker {worker}: {cause}" for worker, cause in sorted(failed.items()))
    return (
        f"expected {this_version()} on every worker, got {causes}. "
        f"Install the same version everywhere, or close the workers without it."
    )


async def installed_version(run: Any, exc: Exception) -> str:
    """Return the package's version in another process of the cluster, called by its ``run``.

    The exception that the process has raised is its cause, unless the version differs: it would
    name both versions again, the other way round.
    """
    try:
        reply = await run(function=dumps(metadata.version), args=dumps(("dask-p2p",)))
        version = reply["result"]  # a scheduler does not deserialize it by itself
        if not isinstance(version, str):
            version = deserialize(version.header, version.frames)
        installed = f"dask_p2p {version}"
    except Exception:
        return f"no dask_p2p ({exc})"
    return f"{installed} ({exc})" if installed == this_version() else installed
