"""Checkpoints: copies of members' states, on their own workers and on those of others.

A state is what a member's function needs to go on at a step: the bytes of some arrays. Each member
keeps its own, and its *buddy*, a member on another worker, keeps it too. So all states are still
there when a worker dies, and a new attempt goes on at the newest step of which they are.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from operator import index
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from dask_p2p.config import duration_s
from dask_p2p.errors import InputError
from dask_p2p.sections.devices import HOST, Host
from dask_p2p.sections.link import AttemptEndedError, Buffer
from dask_p2p.sections.links import Links
from dask_p2p.sections.state_memory import (
    CHANGED,
    EMPTY,
    SAME,
    StateMemory,
    changes,
    copied_from,
    copied_into,
    size_of,
)
from dask_p2p.types import Array

logger = logging.getLogger(__name__)

GENERATIONS = 2  # of states, of which the newer one may be there in parts only

#: States of one gang, by rank and step.
GangStates: TypeAlias = defaultdict[int, dict[int, memoryview]]


class SavedStates:
    """The states that a worker keeps, of its own members and of others. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._gangs: dict[str, GangStates] = {}

    def open(self, gang: str) -> GangStates:
        """Return where states of a gang are kept, until they are dropped."""
        with self._lock:
            return self._gangs.setdefault(gang, defaultdict(dict))

    def add(self, to: GangStates, rank: int, step: int, state: memoryview) -> None:
        """Keep a state; of older ones only the newest."""
        with self._lock:
            to[rank][step] = state
            for old in sorted(to[rank])[:-GENERATIONS]:
                del to[rank][old]

    def trim(self, to: GangStates, is_kept: Callable[[int], bool]) -> None:
        """Drop states of steps that are not needed any more."""
        with self._lock:
            for states in to.values():
                for step in [step for step in states if not is_kept(step)]:
                    del states[step]

    def get(self, gang: str, rank: int, step: int) -> memoryview | None:
        """Return a state; None if it is not here."""
        with self._lock:
            return self._gangs.get(gang, GangStates(dict))[rank].get(step)

    def steps(self, gang: str) -> list[tuple[int, list[int]]]:
        """Return for each rank the steps whose states are here."""
        with self._lock:
            return [(rank, sorted(states)) for rank, states in self._gangs.get(gang, {}).items()]

    def clear(self, gang: str) -> None:
        """Drop all states of a gang that are here."""
        with self._lock:
            for states in self._gangs.get(gang, GangStates(dict)).values():
                states.clear()

    def drop(self, gang: str) -> None:
        """Forget all states of a gang, and those that members still add where they are."""
        with self._lock:
            self._gangs.pop(gang, None)

    @property
    def gangs(self) -> list[str]:
        """Those of which there are states."""
        with self._lock:
            return list(self._gangs)


def buddies(workers: Sequence[str]) -> list[int | None]:
    """Return for each member the next one on another worker; None if there is none.

    >>> buddies(["a", "a", "b", "c"])
    [2, 2, 3, 0]
    """
    size = len(workers)
    found: list[int | None] = []
    for rank, worker in enumerate(workers):
        others = ((rank + by) % size for by in range(1, size))
        found.append(next((other for other in others if workers[other] != worker), None))
    return found


@dataclass(frozen=True)
class States:
    """The states of one gang, and where its attempt begins."""

    saved: SavedStates  # what this worker keeps
    gang: str
    resume: int | None  # the step at which the attempt begins; None if that is the first
    holders: Sequence[int]  # by rank: the member on whose worker the state of that step is
    tell: Callable[[], None]  # called before the first state is kept


class Checkpoints:
    """A member's states in one attempt."""

    def __init__(
        self,
        rank: int,  # which member this is
        workers: Sequence[str],  # of all members, by rank
        links: Links,  # by which they exchange
        states: States,  # where they are kept
        device: Host = HOST,  # where the arrays lie that are kept
    ) -> None:
        self._rank, self._links, self._states, self._device = rank, links, states, device
        self._buddies = buddies(workers)
        self._resume = states.resume
        self._last = states.resume or 0  # step of the newest state of this attempt
        self._kept: GangStates | None = None
        self._memories = [StateMemory() for _ in range(GENERATIONS)]  # of the oldest state first

    def save(self, step: int, arrays: Sequence[Array]) -> None:
        """Keep a state here, and on the buddy's worker."""
        if self._kept is None:
            # Before the scheduler is told: it may have them dropped at once.
            self._kept = self._states.saved.open(self._states.gang)
            self._states.tell()
            # Of further steps there are those of some members, by an attempt that has ended.
            self._states.saved.trim(self._kept, lambda step: step == self._states.resume)
        # The state before this one is whole when all are here: older ones are not needed then, and
        # the memory of the last but one is used again.
        memory, size_bytes = self._memories[0], size_of(arrays)
        is_new = memory.own is None or len(memory.own) != size_bytes
        call = f"checkpoint of step {step}"
        told = self._links.gather(call, bytes([is_new]))
        self._states.saved.trim(self._kept, lambda step: step >= self._last)
        if any(map(any, told)):
            self._renew(memory, f"memory for the {call}", size_bytes if is_new else None)
        own = memory.own
        assert own is not None
        copied_into(own, arrays, self._device)
        sends = self._to_buddy(b"" if memory.is_seen else own)
        self._links.exchange(f"{call}, its state", sends, memory.places())
        for rank, state in {self._rank: own, **memory.theirs}.items():
            self._states.saved.add(self._kept, rank, step, state)
        self._memories.reverse()
        self._last = step

    def close(self) -> None:
        """Let go of the memory: what is saved keeps the states that others may still need."""
        self._memories.clear()

    def _renew(self, memory: StateMemory, call: str, size_bytes: int | None) -> None:
        """Make memory of so many bytes, if it is given; have that which others make."""
        wards = [rank for rank, of in enumerate(self._buddies) if of == self._rank]
        has_buddy = self._buddies[self._rank] is not None
        name = b"" if size_bytes is None else memory.make(size_bytes, has_buddy)
        told = self._links.exchange(call, self._to_buddy(name), dict.fromkeys(wards))
        answers = {rank: memory.take(rank, bytes(of)) if of else b"" for rank, of in told.items()}
        receives: dict[int, None] = dict.fromkeys(self._to_buddy(b""))
        heard = self._links.exchange(f"{call}, seen", answers, receives)
        if size_bytes is not None:
            memory.know(b"".join(heard.values()))

    def _to_buddy(self, data: Buffer) -> dict[int, Buffer]:
        buddy = self._buddies[self._rank]
        return {} if buddy is None else {buddy: data}

    def restore(self, arrays: Sequence[Array]) -> int:
        """Fill arrays with the state at which this attempt begins; return its step, or 0.

        The function may no longer use an array that has not changed on any member since the start:
        ``x = x + 1`` binds `x` to another array. The attempt begins at the start then, which is
        right for a constant too.

        `InputError` if the arrays are not as large as those that were kept.
        """
        step, self._resume = self._resume, None
        if step is None:
            return 0
        holder, device = self._states.holders[self._rank], self._device
        wards = [r for r, of in enumerate(self._states.holders) if of == self._rank != r]
        sends = {rank: self._found(rank, step) for rank in wards}
        receives = {} if holder == self._rank else {holder: None}
        found = self._links.exchange(f"state of step {step}", sends, receives)
        own = self._found(self._rank, step) if holder == self._rank else found[holder]
        if len(own) != size_of(arrays):
            raise InputError(
                f"expected the arrays that were kept at step {step}, of {len(own)} bytes, got some "
                f"of {size_of(arrays)}. Give restore and checkpoint the same arrays."
            )
        told = self._links.gather(f"state of step {step}, compared", changes(own, arrays, device))
        by_array = enumerate(zip_longest(*told, fillvalue=EMPTY))
        same = [number for number, found in by_array if SAME in found and CHANGED not in found]
        if same:
            logger.warning(
                "Began at the start, not at step %d: arrays %s of its state were as at the start. "
                "Change saved arrays in place, x[...] = ..., and save no constants.",
                step,
                same,
            )
            self._states.saved.clear(self._states.gang)
            self._last = 0
            return 0
        copied_from(own, arrays, device)
        return step

    def _found(self, rank: int, step: int) -> memoryview:
        state = self._states.saved.get(self._states.gang, rank, step)
        if state is None:  # it was there when this member joined
            raise AttemptEndedError(f"the state of member {rank} at step {step} is lost")
        return state


class Period:
    """When checkpoints are due: after so many steps, or so much time.

    All members say the same: time is compared now and then, the more rarely the longer it lasts.
    `InputError` if `every` is neither.
    """

    def __init__(self, every: int | str | None) -> None:  # steps; time, like "30 s"; None for never
        period = checked_period(every)
        self._every = duration_s(period) if isinstance(period, str) else period
        self._began_s = self._last_s = time.monotonic()
        self._done = self._look = 0  # steps so far, and those after which time is compared again

    def is_due(
        self,
        step: int,  # how many there have been
        greatest: Callable[[Array], Array],  # of all members' values, element by element
    ) -> bool:
        """Say whether a checkpoint is due after a step."""
        self._done += 1
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._done < self._look:
            return False
        now_s = time.monotonic()
        own = [now_s - self._last_s, (now_s - self._began_s) / self._done]
        since_s, step_s = greatest(np.array(own))
        is_due = since_s >= self._every
        left_s = self._every if is_due else self._every - since_s
        self._look = self._done + max(1, min(self._done, int(left_s / max(step_s, 1e-9))))
        if is_due:
            self._last_s = now_s
        return bool(is_due)


def checked_period(every: Any) -> int | str | None:
    """Return a number of steps, NumPy's too, as an integer of Python, or a time as it is.

    `InputError` if it is neither, and not None.
    """
    if every is None:
        return None
    with suppress(ValueError, TypeError):
        if isinstance(every, str):
            duration_s(every)
            return every
        if not isinstance(every, bool) and (steps := index(every)) > 0:
            return steps
    raise InputError(
        f"expected a number of steps, a time like '30 s' or None between checkpoints, got "
        f"{every!r}. Give an integer of at least 1, a time, or None for no checkpoints."
    )
