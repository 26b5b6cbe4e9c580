"""Tasks as functions of a rank's values, and programs that workers keep."""

from __future__ import annotations

import operator

import dask.array as da
import numpy as np
import pytest
from dask.task_spec import Alias, DataNode, List, Task, TaskRef
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

import dask_p2p
from dask_p2p.engine.task import Blocks
from dask_p2p.fusing.planning.sizes import Program, Superstep
from dask_p2p.fusing.running.gang import ProgramContext, Runner, packed, unpacked
from dask_p2p.fusing.running.program import KeptPrograms, ReadyProgram, call_of

VALUES = {"a": 1, ("b", 0): 2, ("b", 1): [3]}


def gathered(*args, **kwargs):
    return args, kwargs


def nodes():
    """Return a strategy for tasks and their arguments, as Dask nests them."""
    keys = st.sampled_from([*VALUES])
    leaves = st.one_of(
        keys.map(TaskRef),
        keys.map(Alias),
        st.integers().map(lambda value: DataNode(None, value)),
        st.sampled_from([0, None, "a", ("b", 0), [TaskRef]]),
        st.lists(keys, min_size=1, max_size=3).map(lambda found: Blocks(*found)),
    )

    def nested(inner):
        args, kwargs = st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("xy"), inner)
        return st.one_of(
            st.builds(lambda a, k: Task("task", gathered, *a, **k), args, kwargs),
            args.map(lambda found: List(*found)),
        )

    return nested(st.recursive(leaves, nested, max_leaves=6))


@given(nodes())
def test_tasks_have_the_values_of_dask(task):
    assert call_of(task)(VALUES) == task({key: VALUES[key] for key in task.dependencies})


def test_arguments_are_those_of_each_call():
    call = call_of(Task("t", operator.sub, TaskRef("a"), TaskRef("c")))
    assert [call({"a": 1, "c": 2}), call({"a": 5, "c": 2})] == [-1, 3]


def program(literal=1, count=1):
    steps = [Task(("t", n), operator.add, TaskRef("x"), TaskRef("one")) for n in range(count)]
    keys = tuple(step.key for step in steps)
    uses = {"x": count, "one": count, **dict.fromkeys(keys, 1)}
    return Program(("x",), {"one": literal}, (Superstep({}, {}, steps),), uses, (keys,), False)


def test_a_program_is_kept_between_runs():
    kept, text = KeptPrograms(), packed(program())
    with kept.running(text, unpacked) as first, kept.running(bytes(text), unpacked) as other:
        assert other is not first, "two runs at the same time"
    with kept.running(bytes(text), unpacked) as again:
        assert again in (first, other)
        assert again.runs_again


def test_a_program_is_not_kept_after_an_exception():
    kept, text = KeptPrograms(), packed(program())
    with pytest.raises(ZeroDivisionError), kept.running(text, unpacked) as first:
        raise ZeroDivisionError
    with kept.running(text, unpacked) as again:
        assert again is not first


def test_a_program_with_a_literal_that_functions_may_change_is_not_kept():
    kept, text = KeptPrograms(), packed(program({"count": 0}))
    with kept.running(text, unpacked) as first:
        assert not first.runs_again
    with kept.running(text, unpacked) as again:
        assert again is not first


def test_few_programs_are_kept():
    texts = [packed(program(count=count)) for count in range(1, 7)]
    kept = KeptPrograms(most_bytes=sum(map(len, texts[-2:])))
    for text in (*texts, texts[-2]):
        with kept.running(text, unpacked):
            pass
    assert [*kept._programs] == [texts[-1], texts[-2]]
    large = packed(program(np.random.default_rng(0).bytes(2 * kept._most_bytes)))
    with kept.running(large, unpacked) as ready:
        assert not ready.runs_again
    assert [*kept._programs] == [texts[-1], texts[-2]]


def test_functions_that_change_their_arguments():
    """Each call of a compiled function finds constants and defaults as they were."""

    def add_to_all(block, total, calls=[]):  # noqa: B006  # as users write it
        total += 1
        calls.append(1)
        return block + total * len(calls)

    x, total = da.ones((6, 2), chunks=(2, 2)), da.from_array(np.zeros((6, 2)), chunks=(2, 2))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        u = x.persist()
        step = dask_p2p.compile(lambda u: u.map_blocks(add_to_all, total, meta=u._meta), u)
        for _ in range(3):
            np.testing.assert_array_equal(step(u).compute(), np.full((6, 2), 2.0))


def overwritten(x, one):
    one += x
    return one


def test_literals_that_functions_overwrite():
    step = Task("t", overwritten, TaskRef("x"), TaskRef("one"))
    uses = {"x": 1, "one": 1, "t": 1}
    literals = {"one": np.ones(3)}
    ready = ReadyProgram(
        Program(("x",), literals, (Superstep({}, {}, [step]),), uses, (("t",),), False), True
    )
    for _ in range(2):
        ((made,),) = Runner(ProgramContext(None), ready).run([np.ones(3)])
        np.testing.assert_array_equal(made, np.full(3, 2.0))


def test_whether_functions_may_overwrite():
    ready = ReadyProgram(program())
    ((step,),) = ready.steps
    assert not step.overwrites
    assert set(step.reads) == {"x", "one"}
