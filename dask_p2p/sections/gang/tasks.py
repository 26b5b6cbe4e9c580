"""The tasks around the ranks of a gang: the commit task and the output tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dask.task_spec import TaskRef

from dask_p2p.engine.task import Blocks, WaitTask
from dask_p2p.plugins.gangs.coordinator import COMMIT
from dask_p2p.types import Key


def commit_task(gang: str, ranks: Iterable[Key]) -> WaitTask:
    """Return the task that depends on all ranks of a gang, by the keys of their tasks."""
    return WaitTask((gang, COMMIT), _depend_on_all, Blocks(*ranks))


def commit_of(gang: str) -> Blocks:
    """Return the dependency of output tasks on the commit of their gang."""
    return Blocks((gang, COMMIT))


def output_task(key: Key, commit: Blocks, rank: Key, number: int, position: int) -> WaitTask:
    """Return the task of one output block: the rank's block at a position in one of its arrays."""
    return WaitTask(key, _output, commit, TaskRef(rank), number, position)


def _depend_on_all(ranks: list[Any]) -> None:
    """Do nothing: the outputs of all ranks count as soon as this is done."""


def _output(commit: list[Any], made: list[list[Any]], number: int, position: int) -> Any:
    return made[number][position]
