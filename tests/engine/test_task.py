from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from dask.task_spec import Task, TaskRef
from distributed import Reschedule

from dask_p2p.config import options
from dask_p2p.engine import task as module
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.context import TaskContext
from dask_p2p.engine.remote import BlockRef
from dask_p2p.engine.task import (
    AssembleTask,
    Blocks,
    WaitTask,
    assemble_block,
    is_fusable,
    run_name,
)
from dask_p2p.errors import TransferError
from dask_p2p.plans import redistribution

PLAN = redistribution(((2, 2), (4,)), (1, 0), ((2, 2), (4,)))
OUTPUT = OutputSpec(("x",), np.dtype("i8"), "numpy", options())
KEYS = [("x", 0, 0), ("x", 1, 0)]


@pytest.fixture
def task():
    return AssembleTask(
        ("y", 1, 0), assemble_block, ("y", 1, 0), PLAN, (1, 0), OUTPUT, Blocks(*KEYS)
    )


@pytest.mark.parametrize(
    ("key", "name", "is_ours"),
    [
        (("p2p-on-gpu-01", 0), "p2p-on-gpu-01", True),
        (("array-p2p-on-gpu-01", 0), "p2p-on-gpu-01", True),
        (("array-01", 0), "array-01", False),
        ((7, 0), 7, False),
        ("finalize-01", "finalize-01", False),
    ],
)
def test_a_task_that_is_fused_has_the_name_of_its_array(key, name, is_ours):
    assert (run_name(key), is_fusable(key)) == (name, is_ours)


def test_dependencies_are_all_blocks_that_are_read(task):
    assert task.dependencies == frozenset(KEYS)
    assert task.block_fusion


def test_it_survives_pickling_and_renaming(task):
    again = pickle.loads(pickle.dumps(task))
    assert again.dependencies == task.dependencies
    assert again.args == task.args
    renamed = task.substitute({KEYS[0]: ("z", 0, 0)})
    assert type(renamed) is AssembleTask
    assert renamed.dependencies == {("z", 0, 0), KEYS[1]}
    other = task.substitute({}, key=("other", 1, 0))
    assert other.args == (other.key, *task.args[1:]), "records have the new key"


def test_the_text_about_attempts_is_bounded():
    log = TaskContext("tcp://here")
    for i in range(1000):
        count, causes = log.count_attempt("key", f"{i} {'x' * 10_000}")
    assert count == 1000
    assert "attempt 1000: 999 x" in causes
    assert "x ..." in causes, "omitted text is marked"
    assert len(causes) < 5000


def test_a_task_that_waits_reads_nothing_of_what_it_waits_for():
    waits = WaitTask("z", lambda _, read, by: read * by, Blocks(("all", 0)), TaskRef(KEYS[0]), 3)
    assert waits.dependencies == {("all", 0), KEYS[0]}
    assert waits.blocks.dependencies == {("all", 0)}
    assert [*waits.reads()] == [(KEYS[0], 1)]
    assert waits({("all", 0): None, KEYS[0]: 2}) == 6
    rewritten = waits.substitute({("all", 0): BlockRef("all", ())})
    assert type(rewritten) is WaitTask
    assert rewritten.dependencies == {KEYS[0]}
    assert rewritten({KEYS[0]: 2}) == 6
    fused = Task.fuse(waits, Task("after", lambda z: z + 1, TaskRef("z")))
    assert fused({("all", 0): None, KEYS[0]: 2}) == 7


def test_failures_are_rescheduled_with_growing_pauses_and_then_raised(monkeypatch):
    pauses_s = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=pauses_s.append))
    chosen = options()
    runtime = TaskContext("tcp://here")
    error = TransferError("comm: tcp://there is deaf")
    for _ in range(2):  # whoever wants it again is given as many attempts again
        for _ in range(chosen.attempts - 1):
            with pytest.raises(Reschedule):
                module.reschedule_failed("key", error, runtime, chosen)
        assert pauses_s[:3] == [0.05, 0.1, 0.2]
        assert max(pauses_s) <= 2.0
        with pytest.raises(
            TransferError,
            match=r"'key' failed 8 times on tcp://here: attempts 1 to 8:.*deaf\. Check",
        ):
            module.reschedule_failed("key", error, runtime, chosen)
        pauses_s.clear()
