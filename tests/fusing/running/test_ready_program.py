"""Tasks as functions of a rank's values, and programs that workers keep."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
import scipy.fft
import toolz
from dask.array.core import getter
from dask.array.random import _choice_rng as known_choice
from dask.task_spec import Alias, DataNode, List, Task, TaskRef
from distributed.protocol.pickle import dumps
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.engine.task import Blocks
from dask_p2p.fusing.planning.sizes import Program, Superstep
from dask_p2p.fusing.running import program as module
from dask_p2p.fusing.running.program import Functions, KeptPrograms, call_of
from dask_p2p.ops.overlap import Stencil, Trim
from tests.fusing.support import smooth

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
        st.lists(keys, min_size=1, max_size=3).map(lambda keys: Blocks(*keys)),
    )

    def nested(inner):
        args, kwargs = st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("xy"), inner)
        return st.one_of(
            st.builds(lambda a, k: Task("task", gathered, *a, **k), args, kwargs),
            args.map(lambda values: List(*values)),
        )

    return nested(st.recursive(leaves, nested, max_leaves=6))


@given(nodes())
def test_tasks_have_the_values_of_dask(task):
    assert call_of(task)(VALUES) == task({key: VALUES[key] for key in task.dependencies})


def program(literal=1, count=1):
    steps = [Task(("t", n), operator.add, TaskRef("x"), TaskRef("one")) for n in range(count)]
    keys = tuple(step.key for step in steps)
    uses = {"x": count, "one": count, **dict.fromkeys(keys, 1)}
    return Program(("x",), {"one": literal}, (Superstep({}, {}, steps),), uses, (keys,), False)


def test_a_program_is_kept_between_runs():
    programs, text = KeptPrograms(), dumps(program())
    with programs.running(text) as first, programs.running(bytes(text)) as second:
        assert second is not first, "two runs at the same time"
    with programs.running(bytes(text)) as again:
        assert again in (first, second)
        assert again.runs_again


def test_a_program_with_a_literal_that_functions_may_change_is_not_kept():
    programs, text = KeptPrograms(), dumps(program({"count": 0}))
    with programs.running(text) as first:
        assert not first.runs_again
    with programs.running(text) as again:
        assert again is not first


def test_few_programs_are_kept():
    texts = [dumps(program(count=count)) for count in range(1, 7)]
    programs = KeptPrograms(most_bytes=sum(map(len, texts[-2:])))
    for text in (*texts, texts[-2]):
        with programs.running(text):
            pass
    assert [*programs._programs] == [texts[-1], texts[-2]]
    large = dumps(program(np.random.default_rng(0).bytes(2 * programs._most_bytes)))
    with programs.running(large) as ready:
        assert not ready.runs_again
    assert [*programs._programs] == [texts[-1], texts[-2]]


# --- functions of tasks: those of users, and those that keep a state


X = TaskRef("x")
FACTOR, SEEN = 3, []


def scaled(block):
    return block * FACTOR


def recorded(block):
    SEEN.append(1)
    return block


class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self, block):
        self.count += 1
        return block + self.count


def by_value(function):
    """Return a function as cloudpickle makes it: no module has it."""
    function_copy = type(function)(
        function.__code__, function.__globals__, "by_value", function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    function_copy.__qualname__ = "by_value"
    return function_copy


def default(block, calls=[]):  # noqa: B006
    return block


def closing_over(value):
    return lambda block: (value, block)[1]


def calls_itself(n):
    return calls_itself(n - 1) if n else 0


@pytest.mark.parametrize(
    "task",
    [
        Task("y", operator.add, X, X),
        Task("y", np.sum, X, axis=(0, 1), keepdims=True),
        Task("y", getter, X, (slice(0, 3), [1, 2]), lock=None),
        Task("y", functools.partial(np.std, ddof=1), List(X, X)),
        Task("y", toolz.compose(np.abs, np.sum), X),
        Task("y", np.add, X, np.ones(3)),
        Task("y", np.sum, X, out=None),
        Task("y", scipy.fft.fft, X, overwrite_x=False),
    ],
)
def test_functions_of_known_packages(task):
    assert not Functions().is_of_user(task)


@pytest.mark.parametrize(
    ("task", "is_constant"),
    [
        (Task("y", smooth, X), True),
        (Task("y", functools.partial(np.apply_along_axis, smooth, 0), X), True),
        (Task("y", by_value(scaled), X), True),
        (Task("y", closing_over((1, "a", np.sum))), True),
        (Task("y", by_value(calls_itself), X), True),
        (Task("y", Stencil(smooth, Trim((((1, 1),),))), X), True),
        (Task("y", by_value(recorded), X), False),
        (Task("y", by_value(default), X), False),
        (Task("y", closing_over([]), X), False),
        (Task("y", closing_over(np.ones(3)), X), False),
        (Task("y", Counter(), X), False),
        (Task("y", Counter().__call__, X), False),
        (Task("y", np.random.default_rng(0).normal, X), False),
        (Task("y", smooth, X, np.random.default_rng(0)), False),
        (Task("y", smooth, X, buffer=np.empty(3)), False),
        (Task("y", toolz.compose(np.abs, Counter()), X), False),
        (Task("y", np.vectorize(by_value(recorded)), X), False),
        (Task("y", Stencil(Counter()), X), False),
        (Task("y", operator.iadd, X, 1), True),
        (Task("y", np.add, X, 1, np.empty(3)), False),
        (Task("y", np.add, X, 1, out=np.empty(3)), False),
        (Task("y", np.add, X, 1, out=X), True),
        (Task("y", functools.partial(np.add, 1, out=np.empty(3)), X), False),
        (Task("y", scipy.fft.fft, X, overwrite_x=True), True),
        (Task("y", known_choice, np.random.PCG64(0), 5), False),
        (Task("y", known_choice, np.random.RandomState(0), 5), False),
    ],
)
def test_functions_of_users(task, is_constant):
    functions = Functions()
    for _ in range(2):  # also from memory
        assert functions.is_of_user(task)
        assert (functions.fresh(task) is task) is is_constant


@pytest.mark.parametrize("runs_again", [False, True])
def test_a_copy_for_each_task(runs_again, monkeypatch):
    pickled = []
    monkeypatch.setattr(module, "dumps", lambda task: pickled.append(task) or dumps(task))
    functions, counter = Functions(runs_again), Counter()
    assert [functions.fresh(counter)(0) for _ in range(3)] == [1, 1, 1]
    assert len(pickled) == (1 if runs_again else 3)
    assert counter.count == 0
