"""The scheduler's side of gangs: passes events to the coordinator, and its orders to ranks.

Ranks request orders by RPC. A reply is sent when the order changes, or after `_POLL_S`; then the
rank sends the next request. The coordinator makes all decisions, each in one call on the
scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeAlias

import dask.order

from dask_p2p.config import options
from dask_p2p.plugins.gangs.coordinator import COMMIT, Coordinator, Order
from dask_p2p.plugins.gangs.gathering import Gathering
from dask_p2p.plugins.placement import Overlay, has_room, resource_needs
from dask_p2p.transports.rpc import Background, rpc_handler
from dask_p2p.types import Key

logger = logging.getLogger(__name__)

#: Requests of ranks to the scheduler.
JOIN, LEAVE, ORDER = "p2p_section_join", "p2p_section_leave", "p2p_section_order"
SAVES, GIVE_BACK = "p2p_section_saves", "p2p_section_give_back"
#: Requests of the scheduler to workers.
FORGET = "p2p_section_forget"

_POLL_S = 5.0
_ELSEWHERE_S = 1.0  # delay until a rank without room is rescheduled
_MOST_NAMES = 1000  # arrays whose graphs are left to Dask

#: Returns the tasks that compute some keys without a gang.
Substitute: TypeAlias = Callable[[Sequence[Key]], Mapping[Key, Any]]


class Gangs:
    """Runs gangs of ranks. A rank's task has the key ``(gang, rank)``."""

    def __init__(
        self,
        scheduler: Any,
        is_on: Callable[[], bool],  # whether the scheduler has the plugin, and sends it events
        put_back: Callable[[], None],  # adds the plugin again, unless another one is there
    ) -> None:
        self._scheduler, self._is_on, self._put_back = scheduler, is_on, put_back
        self._options = options()
        self._has_had_gangs = False
        self._begin()
        target = scheduler.handlers["adaptive_target"]
        self._changed = asyncio.Event()
        self._keepers: defaultdict[str, set[str]] = defaultdict(set)  # workers with states, by gang
        self._background = Background()
        #: By gang: the tasks that Dask runs in its place, after the loss of a worker or memory.
        self.substitutes: dict[str, Substitute] = {}
        #: Names of arrays whose gangs have ended so. Their graphs are left to Dask.
        self.left_to_dask: dict[Any, None] = {}
        scheduler.handlers |= {
            JOIN: self.join,
            LEAVE: self.leave,
            ORDER: self.order,
            SAVES: self.saves,
            GIVE_BACK: self.give_back,
            "adaptive_target": Overlay(target, self._record_target, is_on),
        }

    def _begin(self) -> None:
        self._coordinator = Coordinator(self._options.attempts)
        self._gathering = Gathering(self._scheduler, self._coordinator, self._options.warn_after_s)
        self.update_graph(self._scheduler.tasks)

    def update_graph(self, keys: Iterable[Any]) -> None:
        """Watch the gangs among tasks from their arrival: a rank may never join."""
        self._has_had_gangs = self._gathering.add(keys) or self._has_had_gangs

    def _record_target(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._gathering.record_target()
        return original(*args, **kwargs)

    def close(self) -> None:
        self._gathering.close()

    def _check_is_on(self) -> None:
        """Install the plugin again if it was removed, and restart all gangs.

        While it was removed, no event of the ranks' tasks was recorded. If the scheduler has
        another plugin now, that one runs the gangs.
        """
        if self._is_on():
            return
        self.close()
        self._coordinator = Coordinator(self._options.attempts)
        for gang in tuple(self._keepers):
            self._drop_states(gang)
        self._put_back()
        if self._is_on():
            self._begin()

    @rpc_handler
    async def join(
        self,
        gang: str,
        size: int,
        rank: int,
        token: str,
        worker: str,
        endpoint: str,
        saved: Iterable[tuple[int, Sequence[int]]],
        is_resident: bool = False,
    ) -> dict[str, Any]:
        self._check_is_on()
        # A task that was cancelled in the meantime would make a gang that never ends.
        task = self._scheduler.tasks.get((gang, rank))
        on = task.processing_on if task is not None and task.state == "processing" else None
        if on is None or on.address != worker:
            return asdict(Order("stopped"))
        if resource_needs(task):
            placed_ranks = self._coordinator.waiting(gang, worker) - {rank}
            placed_tasks = [self._scheduler.tasks[gang, placed] for placed in placed_ranks]
            if not has_room(on, task, placed_tasks):  # of resources for all these ranks
                await asyncio.sleep(_ELSEWHERE_S)
                return asdict(Order("stopped"))
        states = {holder: list(steps) for holder, steps in saved}
        is_new = self._coordinator.size(gang) is None
        again = self._coordinator.join(
            gang, size, rank, token, worker, endpoint, states, is_resident
        )
        if again or is_new:
            # A new gang has outputs only if the plugin was removed after an earlier attempt.
            self._release_soon((gang, peer_rank) for peer_rank in (*range(size), COMMIT))
        self._wake_ranks()
        return await self._next_order(gang, rank, token, "waiting")

    @rpc_handler
    async def leave(
        self, gang: str, rank: int, token: str, cause: str = "", error: bytes | None = None
    ) -> dict[str, Any]:
        self._coordinator.leave(gang, rank, token, cause, error)
        self._wake_ranks()
        if self._coordinator.is_committed(gang):
            self._drop_states(gang)
        return {}

    @rpc_handler
    async def order(self, gang: str, rank: int, token: str, known_state: str) -> dict[str, Any]:
        return await self._next_order(gang, rank, token, known_state)

    @rpc_handler
    async def saves(self, gang: str, rank: int, token: str, worker: str) -> dict[str, Any]:
        self._keepers[gang].add(worker)
        task = self._scheduler.tasks.get((gang, rank))
        has_failed = task is not None and task.state == "erred"
        if has_failed or self._coordinator.size(gang) is None:  # cancelled in the meantime
            self._drop_states(gang)
        return {}

    @rpc_handler
    async def give_back(self, gang: Any) -> Any:
        """Give the outputs of a gang back to Dask's tasks; reply whether there are some."""
        return {"is_given_back": self._give_back(gang)}

    def _give_back(self, gang: str) -> bool:
        substitute = self.substitutes.pop(gang, None)
        commit = self._scheduler.tasks.get((gang, COMMIT))
        if substitute is None or commit is None or commit.state != "waiting":
            return False
        outputs = [task.key for task in commit.dependents]
        tasks = substitute(outputs)
        for key in outputs:
            # The value of a whole array has a new name in each call.
            blocks = [key] if isinstance(key, tuple) else tasks[key].dependencies
            self.left_to_dask |= {block[0]: None for block in blocks if isinstance(block, tuple)}
        while len(self.left_to_dask) > _MOST_NAMES:
            del self.left_to_dask[next(iter(self.left_to_dask))]
        logger.info("Dask's tasks compute %d outputs in place of %s", len(outputs), gang)
        replace_tasks(self._scheduler, outputs, tasks, commit.key)
        return True

    def _drop_states(self, gang: str) -> None:
        for worker in self._keepers.pop(gang, ()):
            if worker in self._scheduler.workers:
                call = getattr(self._scheduler.rpc(worker), FORGET)(gang=gang)
                self._background.start(call)  # it fails if the worker is closing

    def add_worker(self) -> None:
        self._gathering.record_joined()

    def log_event(self, topic: str, msg: Any) -> None:
        """Record the loss of a worker. Only this event shows whether the departure was expected."""
        if topic != "all" or not isinstance(msg, dict) or msg.get("action") != "remove-worker":
            return
        if msg.get("expected"):
            return
        self._gathering.record_lost()
        for key in msg.get("processing-tasks", ()):
            if isinstance(key, tuple) and key[0] in self.substitutes:
                # The values of its ranks may have been too large for the worker.
                asyncio.get_running_loop().call_soon(self._give_back, key[0])

    def transition(self, key: Any, start: str, finish: str) -> None:
        """Pass transitions of ranks' tasks to the coordinator.

        If a worker leaves, Dask releases its tasks. If a rank's task fails, Dask releases those of
        the other ranks, because all tasks that depend on them fail as well.
        """
        if not self._has_had_gangs:  # saves the scheduler 1 µs a transition
            return
        if finish == "forgotten":
            self._gathering.forget(key)
        if not isinstance(key, tuple) or len(key) != 2:
            return
        gang, rank = key
        if rank == COMMIT:
            if finish in ("forgotten", "erred"):
                self.substitutes.pop(gang, None)
            return
        size = self._coordinator.size(gang)
        if size is None:
            return
        if start == "processing" and finish != "memory":
            self._coordinator.drop(gang, rank, f"the task of rank {rank} was released by Dask")
        if finish == "memory" and not self._coordinator.is_committed(gang):
            # The gang was committed, and lost another output before this one was reported.
            self._release_soon([key])
        elif finish == "erred":  # no retries are left, so no attempt will resume from the states
            self._drop_states(gang)
        elif finish == "forgotten":
            peer_keys = ((gang, peer_rank) for peer_rank in range(size) if peer_rank != rank)
            if not any(peer_key in self._scheduler.tasks for peer_key in peer_keys):
                self._coordinator.forget(gang)
                self._drop_states(gang)
        self._wake_ranks()

    async def _next_order(
        self, gang: str, rank: int, token: str, known_state: str
    ) -> dict[str, Any]:
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + _POLL_S
        while True:
            self._check_is_on()
            order = self._coordinator.order(gang, rank, token)
            if order.state == "running" and order.resume is not None and not order.failures:
                # Dask counts the workers lost under a task, up to `allowed-failures`. After a new
                # checkpoint the count starts again, as that of attempts does.
                self._scheduler.tasks[gang, rank].suspicious = 0
            left_s = deadline_s - now_s()
            if order.state != known_state or left_s <= 0:
                return asdict(order)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    def _wake_ranks(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _release_soon(self, keys: Iterable[Any]) -> None:
        asyncio.get_running_loop().call_soon(self._release, tuple(keys))

    def _release(self, keys: tuple[Any, ...]) -> None:
        tasks = self._scheduler.tasks
        invalid_keys = [key for key in keys if key in tasks and tasks[key].state == "memory"]
        stimulus = f"p2p-section-again-{time.time()}"
        self._scheduler.transitions(dict.fromkeys(invalid_keys, "released"), stimulus_id=stimulus)


def replace_tasks(
    scheduler: Any,
    outputs: Sequence[Key],  # of tasks that wait
    tasks: Mapping[Key, Any],  # that make them
    unused: Key,  # of a task that they wait for
) -> None:
    """Let waiting tasks run other functions, and forget a task that they do not need any more.

    Tasks that the scheduler already has stay unchanged.
    """
    states, new_tasks, stack = scheduler.tasks, dict[Key, Any](), [*outputs]
    while stack:
        key = stack.pop()
        if key not in new_tasks and (key in outputs or key not in states):
            new_tasks[key] = tasks[key]
            stack += tasks[key].dependencies
    inside = {key: {*task.dependencies} & new_tasks.keys() for key, task in new_tasks.items()}
    order = dask.order.order(new_tasks, dependencies=inside)
    priority, annotations = states[unused].priority, states[unused].annotations
    for key in outputs:
        state = states[key]
        for before in state.dependencies:
            before.dependents.discard(state)
            (before.waiters or set()).discard(state)
        state.dependencies.clear()
        state.waiting_on, state.state, state.run_spec = None, "released", new_tasks[key]
    for key, task in new_tasks.items():
        if key not in states:
            scheduler.new_task(key, task, "released").annotations = dict(annotations or {})
        states[key].priority = (*priority[:-1], order[key])
    for key, task in new_tasks.items():
        for read in task.dependencies:
            states[key].add_dependency(states[read])
    if (spans := scheduler.extensions.get("spans")) is not None:
        spans.observe_tasks([states[key] for key in new_tasks], code=(), span_metadata={})
    finish = {unused: "forgotten"} | dict.fromkeys(outputs, "waiting")
    scheduler.transitions(finish, stimulus_id=f"p2p-give-back-{time.time()}")
