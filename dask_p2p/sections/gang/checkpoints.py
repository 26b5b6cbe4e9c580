"""Checkpoints: copies of ranks' states on their own workers, and on other workers.

A state is the data that a rank's function needs to resume at a step: the bytes of some arrays. Each
rank keeps its own state. Its *replica rank*, on another worker, keeps a copy. So all states
survive the loss of a worker, and a new attempt resumes at the newest complete step.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, prod
from operator import index
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from dask_p2p.config import parse_duration
from dask_p2p.errors import InputError, TransferError
from dask_p2p.geometry import Layout
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.wire.connection import AttemptEndedError, Buffer
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.transports.buffers import Segment, SegmentName
from dask_p2p.types import Array, DType

logger = logging.getLogger(__name__)

GENERATIONS = 2  # states kept for a rank: the newest may not be complete on all ranks

#: States of one gang, by rank and step.
GangStates: TypeAlias = defaultdict[int, dict[int, memoryview]]


class SavedStates:
    """The states that a worker keeps, of its own ranks and of others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._gangs: dict[str, GangStates] = {}

    def open(self, gang: str) -> GangStates:
        """Return the container for states of a gang, which is valid until `drop`."""
        with self._lock:
            return self._gangs.setdefault(gang, defaultdict(dict))

    def add(self, to: GangStates, rank: int, step: int, state: memoryview) -> None:
        with self._lock:
            to[rank][step] = state

    def trim(self, to: GangStates, is_kept: Callable[[int], bool]) -> None:
        """Drop the states of all steps unless `is_kept(step)`."""
        with self._lock:
            for states in to.values():
                for step in [step for step in states if not is_kept(step)]:
                    del states[step]

    def get(self, gang: str, rank: int, step: int) -> memoryview | None:
        with self._lock:
            return self._gangs.get(gang, GangStates(dict))[rank].get(step)

    def steps(self, gang: str) -> list[tuple[int, list[int]]]:
        with self._lock:
            return [(rank, sorted(states)) for rank, states in self._gangs.get(gang, {}).items()]

    def drop(self, gang: str) -> None:
        """Drop a gang's container with all states, also with states that ranks still add."""
        with self._lock:
            self._gangs.pop(gang, None)

    @property
    def gangs(self) -> list[str]:
        with self._lock:
            return list(self._gangs)


def replica_ranks(workers: Sequence[str]) -> list[int | None]:
    """Return the replica rank of each rank: the next one on another worker, or None.

    >>> replica_ranks(["a", "a", "b", "c"])
    [2, 2, 3, 0]
    """
    size = len(workers)
    replicas: list[int | None] = []
    for rank, worker in enumerate(workers):
        next_ranks = ((rank + by) % size for by in range(1, size))
        replicas.append(
            next((next_rank for next_rank in next_ranks if workers[next_rank] != worker), None)
        )
    return replicas


@dataclass(frozen=True)
class States:
    """The states of one gang, and the first step of its attempt."""

    saved: SavedStates  # states on this worker
    gang: str
    resume: int | None  # step of the state to resume from; None: begin at the start
    holders: Sequence[int]  # by rank: a rank whose worker has the state of that step
    notify: Callable[[], None]  # notifies the scheduler before the first state is kept


class Checkpoints:
    """Saves and restores a rank's states in one attempt."""

    def __init__(
        self,
        rank: int,
        workers: Sequence[str],  # addresses, by rank
        connections: Connections,  # connections to other ranks
        states: States,
        device: Host = HOST,  # device of the saved arrays
    ) -> None:
        self._rank, self._connections = rank, connections
        self._states, self._device = states, device
        self._replica_ranks = replica_ranks(workers)
        self._resume = states.resume
        self._last = states.resume or 0  # step of the newest state of this attempt
        self._gang_states: GangStates | None = None
        self._memories = [StateMemory() for _ in range(GENERATIONS)]  # oldest state first

    def save(self, step: int, arrays: Sequence[Array]) -> None:
        """Keep a state on this worker, and on the replica rank's worker."""
        if self._gang_states is None:
            # Open the container first: once notified, the scheduler may have it dropped.
            self._gang_states = self._states.saved.open(self._states.gang)
            self._states.notify()
            # An attempt that has ended may have left later states of some ranks.
            self._states.saved.trim(self._gang_states, lambda step: step == self._states.resume)
        # When all ranks are here, the previous state is complete on all of them. Older states are
        # not needed then, and the memory of the last but one is used again.
        memory, size_bytes = self._memories[0], size_of(arrays)
        is_new = memory.own_state is None or len(memory.own_state) != size_bytes
        call = f"checkpoint of step {step}"
        gathered = self._connections.gather(call, bytes([is_new]))
        self._states.saved.trim(self._gang_states, lambda step: step >= self._last)
        if any(map(any, gathered)):
            self._renew(memory, f"memory for the {call}", size_bytes if is_new else None)
        own_state = memory.own_state
        assert own_state is not None
        copy_into_state(own_state, arrays, self._device)
        sends = self._to_replica(b"" if memory.is_seen else own_state)
        states, nothing = memory.guarded_states, memoryview(b"")
        into = {r: nothing if r in memory.shared_ranks else state for r, state in states.items()}
        self._connections.exchange(f"{call}, its state", sends, into)
        for rank, state in {self._rank: own_state, **states}.items():
            self._states.saved.add(self._gang_states, rank, step, state)
        self._memories.reverse()
        self._last = step

    def close(self) -> None:
        """Release the memory. `SavedStates` keeps the states that other ranks may still need."""
        self._memories.clear()

    def _renew(self, memory: StateMemory, call: str, size_bytes: int | None) -> None:
        """Allocate memory of a size, if given, and open the guarded ranks' new memory."""
        guarded_ranks = [
            rank for rank, replica in enumerate(self._replica_ranks) if replica == self._rank
        ]
        has_replica = self._replica_ranks[self._rank] is not None
        name = b"" if size_bytes is None else memory.make(size_bytes, has_replica)
        gathered = self._connections.exchange(
            call, self._to_replica(name), dict.fromkeys(guarded_ranks)
        )
        replies = {
            rank: memory.take(rank, bytes(descriptor)) if descriptor else b""
            for rank, descriptor in gathered.items()
        }
        receives: dict[int, None] = dict.fromkeys(self._to_replica(b""))
        received = self._connections.exchange(f"{call}, seen", replies, receives)
        if size_bytes is not None:
            memory.is_seen, memory.segment = b"".join(received.values()) == _IS_SEEN, None

    def _to_replica(self, data: Buffer) -> dict[int, Buffer]:
        replica = self._replica_ranks[self._rank]
        return {} if replica is None else {replica: data}

    def read_state(self) -> tuple[int, memoryview | None]:
        """Return the step of the state to resume from, and this rank's state; None without one."""
        step, self._resume = self._resume, None
        if step is None:
            return 0, None
        holder = self._states.holders[self._rank]
        guarded_ranks = [
            r for r, holder in enumerate(self._states.holders) if holder == self._rank != r
        ]
        sends = {rank: self._saved_state(rank, step) for rank in guarded_ranks}
        receives = {} if holder == self._rank else {holder: None}
        states = self._connections.exchange(f"state of step {step}", sends, receives)
        state = self._saved_state(self._rank, step) if holder == self._rank else states[holder]
        return step, memoryview(state)

    def _saved_state(self, rank: int, step: int) -> memoryview:
        state = self._states.saved.get(self._states.gang, rank, step)
        if state is None:  # dropped since this rank joined
            raise AttemptEndedError(f"the state of rank {rank} at step {step} is lost")
        return state


class Period:
    """When work of a loop is due: after multiples of numbers of steps, or at intervals of time.

    All ranks get the same answers. They compare their times now and then, less often the longer the
    loop runs. Raises `InputError` for any other interval.
    """

    def __init__(self, *every: int | str | None) -> None:  # steps; time, like "30 s"; None: never
        periods = [*map(checked_period, every)]
        self._counts = [period for period in periods if isinstance(period, int)]
        times = (parse_duration(period) for period in periods if isinstance(period, str))
        self._every_s: float | None = min(times, default=None)
        self._began_s = self._last_s = time.monotonic()
        self._first_step = -1  # number of steps before the first call; -1: there was none
        self._next_comparison = 0  # number of steps at the next comparison of times

    def is_due(
        self,
        step: int,  # number of steps done
        greatest: Callable[[Array], Array],  # elementwise maximum over all ranks
    ) -> bool:
        if self._every_s is None:
            return any(step % count == 0 for count in self._counts)
        if self._first_step < 0:
            self._first_step = step - 1
        if step < self._next_comparison:
            return False
        now_s, step_count = time.monotonic(), step - self._first_step
        times_s = [now_s - self._last_s, (now_s - self._began_s) / step_count]
        since_s, step_s = greatest(np.array(times_s))
        is_due = since_s >= self._every_s
        left_s = self._every_s if is_due else self._every_s - since_s
        self._next_comparison = step + max(1, min(step_count, int(left_s / max(step_s, 1e-9))))
        if is_due:
            self._last_s = now_s
        return bool(is_due)

    def next_step(self, step: int) -> float:
        if self._every_s is not None:
            return max(step + 1, self._next_comparison)
        return self.next_known_step(step)

    def next_known_step(self, step: int) -> float:
        return min(((step // count + 1) * count for count in self._counts), default=inf)


def checked_period(every: Any) -> int | str | None:
    """Return a number of steps as a Python integer, or a time or None unchanged.

    Raises `InputError` for any other value.
    """
    if every is None:
        return None
    with suppress(ValueError, TypeError):
        if isinstance(every, str):
            parse_duration(every)
            return every
        if not isinstance(every, bool) and (steps := index(every)) > 0:
            return steps
    raise InputError(
        f"expected a number of steps, a time like '30 s' or None between checkpoints, got "
        f"{every!r}. Give an integer of at least 1, a time, or None for no checkpoints."
    )


# Memory for states, shared on one host: one copy of a state serves two workers.
#
# A rank copies its state into an anonymous memory file, which its replica rank opens once. If the
# rank is killed, its replica rank still has the memory. Where the replica rank cannot open it, as
# on another host, the rank sends the bytes.

_IS_SEEN, _IS_SENT = b"\1", b"\0"


class StateMemory:
    """Memory for one state of a rank, and for one state of each rank that it guards."""

    def __init__(self) -> None:
        self.own_state: memoryview | None = None  # memory for this rank's state
        self.guarded_states: dict[int, memoryview] = {}  # memory for guarded ranks' states, by rank
        self.is_seen = False  # whether the replica rank shares `own_state`
        self.shared_ranks: set[int] = set()  # guarded ranks whose own memory is shared here
        self.segment: Segment | None = None  # kept until the replica rank has opened it

    def make(self, size_bytes: int, has_replica: bool) -> bytes:
        """Allocate `own_state`; return its descriptor for `take` on the replica rank."""
        self.own_state, self.is_seen = None, False  # free the old memory first
        if has_replica and size_bytes:
            with suppress(OSError):  # no shared memory, or too many open files
                self.segment = segment = Segment.make(size_bytes)
                self.own_state = segment.bytes.data
                return " ".join(map(str, (size_bytes, *segment.name))).encode()
        self.own_state = np.empty(size_bytes, np.uint8).data
        return str(size_bytes).encode()

    def take(self, rank: int, message: bytes) -> bytes:
        """Open or allocate memory for a guarded rank's state; return the reply to that rank."""
        size, *name = message.decode().split()
        self.guarded_states.pop(rank, None)
        self.shared_ranks.discard(rank)
        if name:
            kernel, namespace, *numbers = name
            with suppress(TransferError, OSError):  # another host, or no permission
                segment = Segment.open(SegmentName(kernel, namespace, *map(int, numbers)))
                self.guarded_states[rank] = segment.bytes.data
                self.shared_ranks.add(rank)
                return _IS_SEEN
        self.guarded_states[rank] = np.empty(int(size), np.uint8).data
        return _IS_SENT


def size_of(arrays: Sequence[Array]) -> int:
    """Return the size of the state of these arrays, in bytes."""
    return sum(array.nbytes for array in arrays)


def copy_into_state(state: memoryview, arrays: Sequence[Array], device: Host = HOST) -> None:
    """Copy arrays of a device into a state, one after the other."""
    host = host_arrays(state, [(array.dtype, array.shape) for array in arrays])
    for array, host_array in zip(arrays, host, strict=True):
        device.copy_to_host(host_array, array)


def host_arrays(state: memoryview, specs: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Array]:
    """Return the arrays in a state, as views, by their dtypes and shapes."""
    starts = Layout((dtype.itemsize * prod(shape),) for dtype, shape in specs).starts
    return [
        np.ndarray(shape, dtype, state, start)
        for (dtype, shape), start in zip(specs, starts, strict=True)
    ]
