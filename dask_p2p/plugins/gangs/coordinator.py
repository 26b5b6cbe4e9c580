"""Gang scheduling: all ranks of a gang run at the same time, or none of them.

A *gang* is a set of tasks, its *ranks*, that run at the same time and exchange data. An *attempt*
is one run of all ranks. A gang queues when its last rank has joined, and starts when none of its
workers runs another gang. Until then it reserves its workers, so no gang starves. A *resident* gang
mostly waits for its client, so it shares its workers with other gangs. Any failure ends the attempt
on all ranks, and all of them run again. Outputs count only after all ranks have returned, which
*commits* the attempt.

This is a state machine without Dask, asyncio or a clock. The scheduler's plugin
(`dask_p2p.plugins.gangs.scheduler`) reports events to it, and requests an order for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

#: Replaces the rank in the key of the commit task, which depends on all ranks.
COMMIT = "commit"

State = Literal["waiting", "running", "committed", "stopped"]


@dataclass(frozen=True)
class Order:
    """The coordinator's instruction to one run of a rank.

    "waiting": request the order again later. "running": start the user's function. "committed":
    return the outputs. "stopped": end this run; without an error and a reason, the rank runs again.
    """

    state: State
    attempt: int = 0  # from 1; 0 before the first
    failures: int = 0  # attempts that ended early since the last commit or new checkpoint
    # If it runs:
    peers: tuple[tuple[str, str, str], ...] = ()  # by rank: worker, attempt token and endpoint
    resume: int | None = None  # step of the restored states; None: from the start
    holders: tuple[int, ...] = ()  # by rank: the rank whose worker has its state of that step
    # If it is stopped:
    error: bytes | None = None  # pickled exception that all ranks raise
    reason: str = ""  # reason why it cannot run again, as text


@dataclass(frozen=True)
class Wait:
    """Reason why a gang waits: missing ranks, or, if all have joined, other gangs."""

    size: int
    attempt: int  # number of attempts so far
    missing: list[int]  # ranks that have not joined
    gangs: list[str]  # gangs that occupy its workers, or have reserved them earlier


@dataclass
class _JoinedRank:
    """The newest run of a rank's task that has joined."""

    token: str
    worker: str
    endpoint: str
    saved: Mapping[int, Sequence[int]]
    state: State = "waiting"
    has_returned: bool = False  # True once its function has, in this attempt
    error: bytes | None = None
    reason: str = ""

    def stop(self, error: bytes | None = None, reason: str = "") -> None:
        self.state, self.error, self.reason = "stopped", error, reason


@dataclass
class _Gang:
    size: int
    is_resident: bool = False
    ranks: dict[int, _JoinedRank] = field(default_factory=dict)  # by rank
    phase: Literal["gathering", "running", "committed"] = "gathering"
    attempt: int = 0
    failures: int = 0  # attempts that ended early since the last commit or new complete state
    resume: int | None = None
    holders: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        waiting = [joined.state == "waiting" for joined in self.ranks.values()]
        return len(waiting) == self.size and all(waiting)

    @property
    def workers(self) -> set[str]:
        return set() if self.is_resident else {joined.worker for joined in self.ranks.values()}

    def start(self) -> None:
        self.phase, self.attempt = "running", self.attempt + 1
        for joined in self.ranks.values():
            joined.state = "running"
        holders: dict[int, dict[int, int]] = {}  # by step and rank
        for number, joined in sorted(self.ranks.items()):
            for rank, steps in joined.saved.items():
                for step in steps:
                    holder_by_rank = holders.setdefault(step, {})
                    if rank == number or rank not in holder_by_rank:  # its own copy if there is one
                        holder_by_rank[rank] = number
        complete_steps = [
            step for step, holder_by_rank in holders.items() if len(holder_by_rank) == self.size
        ]
        before, self.resume, self.holders = self.resume, max(complete_steps, default=None), ()
        if self.resume is not None:
            self.holders = tuple(holders[self.resume][rank] for rank in range(self.size))
            if before is None or self.resume > before:
                self.failures = 0


class Coordinator:
    """Starts, ends and commits the attempts of gangs.

    A gang fails after `most_attempts` attempts in succession that ended early without an error of
    the user's function.
    """

    def __init__(self, most_attempts: int) -> None:
        self._most_attempts = most_attempts
        self._gangs: dict[str, _Gang] = {}
        self._queue: list[str] = []  # complete gangs that wait for their workers

    def size(self, gang: str) -> int | None:
        return self._gangs[gang].size if gang in self._gangs else None

    def order(self, gang: str, rank: int, token: str) -> Order:
        """Return the order for one run of a rank; an unknown run is stopped."""
        joined = self._rank(gang, rank, token)
        if joined is None:
            return Order("stopped")
        state = self._gangs[gang]
        order = Order(
            joined.state, state.attempt, state.failures, error=joined.error, reason=joined.reason
        )
        if joined.state != "running":
            return order
        by_rank = (state.ranks[peer_rank] for peer_rank in range(state.size))
        peers = tuple((peer.worker, peer.token, peer.endpoint) for peer in by_rank)
        return replace(order, peers=peers, resume=state.resume, holders=state.holders)

    def join(
        self,
        gang: str,  # its name
        size: int,  # its number of ranks
        rank: int,  # the rank that joins
        token: str,  # attempt token: unique to this run of the rank's task
        worker: str,  # address of the worker that runs it
        endpoint: str = "",  # address for connections of other ranks
        # By rank: the steps whose states that worker has.
        saved: Mapping[int, Sequence[int]] = MappingProxyType({}),
        is_resident: bool = False,  # whether the gang shares its workers
    ) -> list[int]:
        """Record that a rank waits for its gang; return the ranks whose outputs no longer count.

        Such outputs are of a committed attempt. One of them was lost, so all ranks have to run
        again.
        """
        state = self._gangs.setdefault(gang, _Gang(size, is_resident))
        if self._rank(gang, rank, token) is not None:
            return []  # a repeated request
        again: list[int] = []
        if state.phase == "running":
            self._end(state, f"rank {rank} was started again")
        elif state.phase == "committed":
            state.phase = "gathering"
            again = [peer_rank for peer_rank in range(size) if peer_rank != rank]
        state.ranks[rank] = _JoinedRank(token, worker, endpoint, saved)
        self._settle(gang)
        return again

    def leave(
        self,
        gang: str,
        rank: int,
        token: str,  # attempt token of its `join`
        cause: str = "",  # reason why the attempt cannot go on; empty if the function has returned
        error: bytes | None = None,  # pickled exception for all ranks; None if all run again
    ) -> None:
        joined = self._rank(gang, rank, token)
        if joined is None or joined.state != "running" or joined.has_returned:
            return
        state = self._gangs[gang]
        if cause:
            self._end(state, cause, error)
        else:
            joined.has_returned = True
            members = state.ranks.values()
            if all(member.has_returned for member in members):
                state.phase, state.failures, state.resume = "committed", 0, None
                for member in members:
                    member.state = "committed"
        self._settle(gang)

    def drop(self, gang: str, rank: int, cause: str) -> None:
        """Record that a rank's task no longer runs: it was cancelled, moved or lost its worker."""
        state = self._gangs.get(gang)
        joined = state.ranks.get(rank) if state else None
        if state is None or joined is None:
            return
        if joined.state == "running":
            self._end(state, cause)
        elif joined.state == "waiting":
            joined.stop()
        self._settle(gang)

    def is_committed(self, gang: str) -> bool:
        return gang in self._gangs and self._gangs[gang].phase == "committed"

    def has_started(self, gang: str) -> bool:
        return gang in self._gangs and self._gangs[gang].phase != "gathering"

    def waiting(self, gang: str, worker: str | None = None) -> set[int]:
        ranks = self._gangs[gang].ranks.items() if gang in self._gangs else ()
        on_worker = ((rank, joined) for rank, joined in ranks if worker in (None, joined.worker))
        return {rank for rank, joined in on_worker if joined.state == "waiting"}

    def wait(self, gang: str) -> Wait | None:
        """Return the reason why a gang waits; None if no rank of it waits."""
        state = self._gangs.get(gang)
        ranks = state.ranks if state else {}
        present_ranks = [rank for rank, joined in ranks.items() if joined.state == "waiting"]
        if state is None or not present_ranks:
            return None
        missing = [rank for rank in range(state.size) if rank not in present_ranks]
        gangs: list[str] = []
        if not missing:
            before = [*self._running(), *self._queue[: self._queue.index(gang)]]
            gangs = [name for name in before if self._gangs[name].workers & state.workers]
        return Wait(state.size, state.attempt, missing, gangs)

    def forget(self, gang: str) -> None:
        self._gangs.pop(gang, None)
        self._settle(gang)

    def _running(self) -> list[str]:
        return [name for name, gang in self._gangs.items() if gang.phase == "running"]

    def _rank(self, gang: str, rank: int, token: str) -> _JoinedRank | None:
        state = self._gangs.get(gang)
        joined = state.ranks.get(rank) if state else None
        return joined if joined is not None and joined.token == token else None

    def _end(self, gang: _Gang, cause: str, error: bytes | None = None) -> None:
        reason = ""
        gang.failures += 1
        if error is None and gang.failures >= self._most_attempts:
            reason = f"{gang.failures} attempts ended early, the last one because {cause}"
        if error is not None or reason:
            gang.failures = 0  # ranks with retries left start afresh
        gang.phase = "gathering"
        for joined in gang.ranks.values():
            if joined.state == "running":
                joined.stop(error, reason)

    def _settle(self, changed: str) -> None:
        """Queue the changed gang if it is complete, and start all gangs that can start."""
        gang = self._gangs.get(changed)
        is_whole = gang is not None and gang.is_whole
        if is_whole and changed not in self._queue:
            self._queue.append(changed)
        elif not is_whole and changed in self._queue:
            self._queue.remove(changed)
        reserved_workers = set[str]().union(
            *(self._gangs[name].workers for name in self._running())
        )
        for name in tuple(self._queue):
            waiting = self._gangs[name]
            if not waiting.workers & reserved_workers:
                self._queue.remove(name)
                waiting.start()
            reserved_workers |= waiting.workers  # a waiting gang reserves its workers
