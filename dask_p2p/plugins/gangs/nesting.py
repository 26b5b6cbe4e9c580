"""Nested gangs: gangs that the function of another gang computes.

If both need the same worker, neither would end. Dask's client sends the key of the task that has
submitted a graph, which the scheduler uses for priorities alone. An `Overlay` of a private method
records it; `tests/plugins/test_canary.py` checks that the method is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dask_p2p.plugins.gangs.coordinator import COMMIT
from dask_p2p.plugins.placement import Overlay
from dask_p2p.types import Key

#: Method of Dask's scheduler that adds a graph.
SUBMIT = "_create_taskstate_from_graph"
OF_WORKERS = "Client-worker-"  # prefix of the names of clients inside tasks


class Nesting:
    """Records the tasks that a gang's function has submitted, directly or by other tasks."""

    def __init__(
        self,
        scheduler: Any,
        is_wanted: Callable[[], bool],  # called for each graph; False ends the recording
    ) -> None:
        self._scheduler = scheduler
        self._submitter: Key | None = None  # task that has submitted the current graph
        self._outer: dict[Key, str] = {}  # submitting gang, by task
        self._unknown: set[str] = set()  # gangs submitted by a worker's thread outside tasks
        Overlay(scheduler, SUBMIT, self._submitted, is_wanted)

    def _submitted(self, original: Callable[..., Any], **kwargs: Any) -> Any:
        self._submitter = kwargs.get("submitting_task")
        try:
            return original(**kwargs)
        finally:
            self._submitter = None

    def add_submitted(self, client: str, keys: Iterable[Key]) -> None:
        """Record the tasks of the graph that the scheduler is adding."""
        submitter = self._submitter
        if submitter is None:
            if client.startswith(OF_WORKERS):
                self._unknown.update(gangs_of(keys))
            return
        outer = self._outer.get(submitter)
        if isinstance(submitter, tuple) and (submitter[0], COMMIT) in self._scheduler.tasks:
            outer = submitter[0]
        if outer is not None:
            self._outer.update(dict.fromkeys(keys, outer))

    def outer(self, gang: str) -> Iterator[str]:
        """Yield the gangs around this one, from the inside out."""
        seen = {gang}
        while (around := self._outer.get((gang, COMMIT))) is not None and around not in seen:
            seen.add(gang := around)
            yield around

    def may_be_inner(self, gang: str) -> bool:
        """Return whether a worker's thread has submitted a gang outside of any task."""
        return gang in self._unknown

    def forget(self, key: Key) -> None:
        """Drop the records of a task that the scheduler has forgotten."""
        self._outer.pop(key, None)
        if isinstance(key, tuple) and key[1:] == (COMMIT,):
            self._unknown.discard(key[0])


def gangs_of(keys: Iterable[Key]) -> list[str]:
    """Return the names of the gangs among tasks, by their commit tasks."""
    return [str(key[0]) for key in keys if isinstance(key, tuple) and key[1:] == (COMMIT,)]
