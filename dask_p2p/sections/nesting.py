"""Which gangs are computed by the function of another one: neither would end if both need a worker.

Dask's client sends the task that has submitted a graph, and its scheduler uses that for priorities
alone. An `Overlay` of a private method takes a note; `tests/plugins/test_canary.py` watches that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dask_p2p.plugins.placement import Overlay
from dask_p2p.sections.coordinator import COMMIT
from dask_p2p.types import Key

#: Method of Dask's scheduler that takes a graph.
SUBMIT = "_create_taskstate_from_graph"
_OF_WORKERS = "Client-worker-"  # how names of clients begin that tasks have


class Nesting:
    """Notes which tasks the function of a gang has submitted, itself or by other tasks."""

    def __init__(
        self,
        scheduler: Any,
        is_wanted: Callable[[], bool],  # asked for each graph; False ends the notes
    ) -> None:
        self._scheduler = scheduler
        self._submitter: Key | None = None  # of the graph that the scheduler is taking
        self._outer: dict[Key, str] = {}  # the gang, by tasks that it has submitted
        self._unknown: set[str] = set()  # gangs that some thread of a worker has submitted
        Overlay(scheduler, SUBMIT, self._submitted, is_wanted)

    def _submitted(self, original: Callable[..., Any], **kwargs: Any) -> Any:
        self._submitter = kwargs.get("submitting_task")
        try:
            return original(**kwargs)
        finally:
            self._submitter = None

    def note(self, client: str, keys: Iterable[Key]) -> None:
        """Note the tasks of the graph that the scheduler is taking."""
        submitter = self._submitter
        if submitter is None:
            if client.startswith(_OF_WORKERS):
                self._unknown.update(gangs_of(keys))
            return
        outer = self._outer.get(submitter)
        if isinstance(submitter, tuple) and (submitter[0], COMMIT) in self._scheduler.tasks:
            outer = submitter[0]
        if outer is not None:
            self._outer.update(dict.fromkeys(keys, outer))

    def outer(self, gang: str) -> Iterator[str]:
        """Return the gang whose function computes this one, and those around it."""
        seen = {gang}
        while (around := self._outer.get((gang, COMMIT))) is not None and around not in seen:
            seen.add(gang := around)
            yield around

    def may_be_inner(self, gang: str) -> bool:
        """Return whether a gang was submitted in a worker's process, by a thread of no task."""
        return gang in self._unknown

    def forget(self, key: Key) -> None:
        """Forget a task that the scheduler has forgotten."""
        self._outer.pop(key, None)
        if isinstance(key, tuple) and key[1:] == (COMMIT,):
            self._unknown.discard(key[0])


def gangs_of(keys: Iterable[Key]) -> list[str]:
    """Return the names of the gangs that there are among tasks."""
    return [str(key[0]) for key in keys if isinstance(key, tuple) and key[1:] == (COMMIT,)]
