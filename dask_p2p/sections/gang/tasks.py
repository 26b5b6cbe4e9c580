"""The tasks of a gang: one for each rank, the commit task, and one for each output block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dask.task_spec import Task, TaskRef

from dask_p2p.config import Options
from dask_p2p.engine.task import Blocks, RankTask, WaitTask
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.plugins.gangs.coordinator import COMMIT
from dask_p2p.sections.gang.rank import run_rank
from dask_p2p.types import Key


def name_of_gang(prefix: str, token: str) -> str:
    """Return the name of a gang, from the prefix of its arrays' names and its token."""
    return f"{prefix}-ranks-{token}"


def commit_of(gang: str) -> Key:
    """Return the key of the commit task, on which all output tasks depend."""
    return (gang, COMMIT)


def gang_tasks(
    gang: str,  # name of the gang
    ranks: RankGrid,
    bodies: Sequence[Any],  # by rank: see `run_rank`
    blocks: Iterable[Sequence[Any]],  # by rank: arguments of the body
    options: Options,  # sent with the tasks
) -> dict[Key, Task]:
    """Return the tasks of the ranks, and the commit task that depends on all of them."""
    tasks: dict[Key, Task] = {}
    for rank, (body, given) in enumerate(zip(bodies, blocks, strict=True)):
        key = (gang, rank)
        tasks[key] = RankTask(key, run_rank, gang, rank, ranks, body, options, *given)
    commit = commit_of(gang)
    return tasks | {commit: WaitTask(commit, _depend_on_all, Blocks(*tasks))}


def output_tasks(
    gang: str,
    number: int,  # of the array
    keys: Iterable[Iterable[Key]],  # of its blocks: by rank, in the order of the rank's blocks
) -> dict[Key, Task]:
    """Return the tasks of one array's blocks, by key."""
    commit = Blocks(commit_of(gang))
    return {
        key: WaitTask(key, _output, commit, TaskRef((gang, rank)), number, position)
        for rank, of_rank in enumerate(keys)
        for position, key in enumerate(of_rank)
    }


def _depend_on_all(ranks: list[Any]) -> None:
    """Do nothing: the outputs of all ranks count as soon as this is done."""


def _output(commit: list[Any], made: list[list[Any]], number: int, position: int) -> Any:
    return made[number][position]
