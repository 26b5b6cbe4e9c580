"""The worker's side of gangs: one attempt of a rank, between its thread and the event loop.

The event loop receives orders of the scheduler. An order that ends an attempt wakes the rank's
thread, also if it waits in an exchange.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from distributed import Worker
from distributed.comm.addressing import get_address_host
from distributed.worker import WORKER_ANY_RUNNING

from dask_p2p.errors import SectionError
from dask_p2p.monitoring.runs import pace_text
from dask_p2p.plugins.context import must_encrypt
from dask_p2p.plugins.dask_internals import SamplingInterval
from dask_p2p.plugins.gangs.coordinator import Order
from dask_p2p.plugins.gangs.scheduler import FORGET, JOIN, LEAVE, ORDER, SAVES
from dask_p2p.plugins.registration import give_plugin
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.gang.checkpoints import Checkpoints, SavedStates, States
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.endpoint import Reach
from dask_p2p.transports.rpc import Background, rpc_handler

_ENDS = ("committed", "stopped")  # final states
_CAUSE_CHARS = 1000
# Interval of Dask's statistical profiler while ranks run on a worker. Dask's own interval is 10 ms.
# Each sample takes a core from a rank, and its neighbours wait: 5 % of small steps.
_SAMPLE_MS = 100.0


class RankAttempt:
    """One attempt of a rank's task."""

    def __init__(
        self,
        ranks: WorkerRanks,  # all ranks of the worker
        gang: str,  # name of the gang
        rank: int,
        size: int,  # number of ranks
        is_resident: bool = False,  # whether the gang shares its workers
        **reach: Any,  # changes to the worker's network settings
    ) -> None:
        self.rank, self.size = rank, size
        self.connections = Connections(replace(ranks.reach, **reach))
        self.token = self.connections.token
        self._ranks, self._worker, self._gang = ranks, ranks.worker, gang
        self._is_resident = is_resident
        self._changed = threading.Condition()
        self._order = Order("waiting")
        self._thread = threading.get_ident()
        self.progress = Progress()  # of the function
        self._pending: set[asyncio.Future[None]] = set()
        self._checkpoints: Checkpoints | None = None

    # --- in the rank's thread

    def order_after(self, *states: str, timeout_s: float | None = None) -> Order:
        with self._changed:
            self._changed.wait_for(lambda: self._order.state not in states, timeout_s)
            return self._order

    def leave(self, cause: str = "", error: bytes | None = None) -> Order:
        """Report the end of the function; return the order that ends this attempt."""
        self._begin(self._call(LEAVE, cause=cause[:_CAUSE_CHARS], error=error))
        return self.order_after("running")

    def checkpoints(self, order: Order, device: Host = HOST) -> Checkpoints:
        """Return the checkpoints of this attempt, for arrays on a device."""

        def notify() -> None:
            # Not cancelled with this attempt: the scheduler must record each worker with states.
            telling = self._call(SAVES, worker=self._worker.address)
            self._worker.loop.add_callback(self._ranks.background.start, telling)

        workers = [worker for worker, *_ in order.peers]
        states = States(self._ranks.saved, self._gang, order.resume, order.holders, notify)
        self._checkpoints = Checkpoints(self.rank, workers, self.connections, states, device)
        return self._checkpoints

    def close(self) -> None:
        """End this attempt, and close its connections."""
        with self._changed:
            if self._order.state not in _ENDS:
                self._order = Order("stopped")  # later orders must not wake closed connections
            self.connections.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None  # breaks a reference cycle, which would keep the states
        self._worker.loop.add_callback(self.stop)

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(
            self._until_done(coroutine), self._worker.loop.asyncio_loop
        )

    # --- on the event loop

    def report(self) -> dict[str, Any]:
        """Return the state of a rank whose attempt runs, for a `RankReport`."""
        frame = sys._current_frames().get(self._thread)
        return {
            "gang": self._gang,
            "rank": self.rank,
            "size": self.size,
            "worker": self._worker.address,
            "step": self.progress.step,
            "steps": self.progress.steps,
            "stack": "".join(traceback.format_stack(frame)),
            **self.connections.state(),
        }

    @property
    def runs(self) -> bool:
        return self._order.state == "running"

    async def _until_done(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Await a coroutine; if it fails, end this attempt."""
        task = asyncio.ensure_future(coroutine)
        self._pending.add(task)
        try:
            await task
        except Exception as exc:
            # A lost scheduler or a closing worker is not an error of the gang.
            ends = isinstance(exc, OSError) or self._worker.status not in WORKER_ANY_RUNNING
            self._apply(Order("stopped", reason="" if ends else f"{type(exc).__name__}: {exc}"))
        finally:
            self._pending.discard(task)

    async def _follow(self) -> None:
        """Join the gang, and receive orders until one ends the attempt."""
        await self._ranks.register()
        order = await self._ask(
            JOIN,
            size=self.size,
            worker=self._worker.address,
            endpoint=self.connections.endpoint,
            saved=self._ranks.saved.steps(self._gang),
            is_resident=self._is_resident,
        )
        while order.state not in _ENDS:
            self._apply(order)
            order = await self._ask(ORDER, known_state=order.state)
        self._apply(order)

    async def _ask(self, op: str, **kwargs: Any) -> Order:
        reply = await self._call(op, **kwargs)
        reply["peers"] = tuple(map(tuple, reply["peers"]))
        reply["holders"] = tuple(reply["holders"])
        return Order(**reply)

    async def _call(self, op: str, **kwargs: Any) -> dict[str, Any]:
        identity = {"gang": self._gang, "rank": self.rank, "token": self.token}
        reply: Any = await getattr(self._worker.scheduler, op)(**identity, **kwargs)
        if not isinstance(reply, dict) or reply.pop("status", None) != "ok":
            raise SectionError(f"the scheduler could not answer: {reply}")
        return reply

    def _apply(self, order: Order) -> None:
        with self._changed:
            if self._order.state not in _ENDS:
                self._order = order
                self._changed.notify_all()
                if order.state == "stopped":
                    self.connections.wake()

    def start(self) -> None:
        """Join the gang. Any thread may call this."""
        self._begin(self._follow())

    def stop(self) -> None:
        """End this attempt on this worker, independently of the gang."""
        self._apply(Order("stopped"))
        for task in tuple(self._pending):
            task.cancel()


class WorkerRanks:
    """The ranks of gangs on a worker, and their states: a part of the worker's plugin."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        #: Network settings of the ranks on this worker.
        self.reach = _reach(worker)
        self.saved = SavedStates()
        self._ranks: dict[str, RankAttempt] = {}  # by attempt token
        worker.handlers |= {FORGET: self.forget}
        self._sampling = SamplingInterval(worker)
        #: Requests that are independent of the attempts of ranks.
        self.background = Background()
        self._is_registered = False

    def close(self) -> None:
        """End the attempts of all ranks here, which wakes their threads."""
        self.worker.handlers.pop(FORGET, None)
        for rank_attempt in tuple(self._ranks.values()):
            rank_attempt.stop()

    def reports(self) -> list[dict[str, Any]]:
        """Return the states of the ranks whose attempts run here."""
        return [
            rank_attempt.report()
            for rank_attempt in tuple(self._ranks.values())
            if rank_attempt.runs
        ]

    def _sample(self) -> None:
        """Set the profiler's interval for the present number of ranks. On the event loop."""
        self._sampling.set_least(_SAMPLE_MS if self._ranks else 0.0)

    @rpc_handler
    async def forget(self, gang: str) -> dict[str, Any]:
        self.saved.drop(gang)
        return {}

    async def register(self) -> None:
        if not self._is_registered:
            await give_plugin(self.worker.scheduler)
            self._is_registered = True

    @contextmanager
    def rank_attempt(self, *arguments: Any, **reach: Any) -> Iterator[RankAttempt]:
        """Run a rank of a gang inside this context. For parameters see `RankAttempt`."""
        rank_attempt = RankAttempt(self, *arguments, **reach)
        self._ranks[rank_attempt.token] = rank_attempt
        try:
            self.worker.loop.add_callback(self._sample)
            rank_attempt.start()
            yield rank_attempt
        finally:
            del self._ranks[rank_attempt.token]
            self.worker.loop.add_callback(self._sample)
            rank_attempt.close()


def _reach(worker: Worker) -> Reach:
    """Return the network settings of a worker's ranks: encrypted if Dask's connections are."""
    host = get_address_host(worker.address)
    if not must_encrypt(worker):
        return Reach(host)
    listening = worker.security.get_listen_args("worker")["ssl_context"]
    connecting = worker.security.get_connection_args("worker")["ssl_context"]
    return Reach() if None in (listening, connecting) else Reach(host, listening, connecting)


logger = logging.getLogger(__name__)

_LOG_S = 10.0  # time between lines of the log
#: Name of the exchanges between ranks, used like a transport's name.
LINK = "connection"


@dataclass(slots=True)
class Progress:
    """Progress of a function. Its own thread writes, others read."""

    step: int = 0  # steps done
    steps: int = 0  # total number of steps; 0 if unknown
    first: int = 0  # first step of this attempt
    #: Whether this rank logs its progress, and the log takes it: checked in each step.
    logs: bool = False
    _last: tuple[int, float] = (0, 0.0)  # step and time of the last line

    def __post_init__(self) -> None:
        self.logs = self.logs and logger.isEnabledFor(logging.INFO)

    def advance(self, step: int) -> None:
        self.step = step
        if self.logs:
            self._log(time.monotonic())

    def _log(self, now_s: float) -> None:
        last, last_s = self._last
        if not last_s:
            self._last = self.step, now_s
        elif now_s - last_s >= _LOG_S:
            rate = (self.step - last) / (now_s - last_s)
            logger.info("%s", pace_text(self.step, self.steps, rate, 0.0))
            self._last = self.step, now_s
