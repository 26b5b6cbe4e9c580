from __future__ import annotations

from operator import add, neg

import pytest
from dask._task_spec import convert_legacy_graph, execute_graph
from dask.task_spec import Alias, Task, TaskRef

from dask_p2p.fusing.planning.tasks import unfused


def fused(key):
    """A task that Dask has fused from two, under a key."""
    first = Task(("a", 0), add, TaskRef(("x", 0)), 1)
    return Task.fuse(first, Task(("b", 0), neg, TaskRef(("a", 0))), key=key)


@pytest.mark.parametrize("key", [("b", 0), ("c", 0)])
def test_the_parts_take_the_place_of_a_fused_task(key):
    graph = {("x", 0): Task(("x", 0), int, 4), key: fused(key)}
    found = unfused(graph)
    assert {*found} == {("x", 0), ("a", 0), key}
    assert found["a", 0].func is add
    assert found[key].func is neg
    assert run_of(found, key) == run_of(graph, key) == -5


def test_other_tasks_stay():
    graph = {"a": Task("a", add, 1, 2), "b": Alias("b", "a"), "c": 3}
    assert unfused(graph) == graph


def test_inputs_of_other_keys():
    task = fused(("b", 0)).substitute({("x", 0): ("y", 0)})
    assert unfused({("b", 0): task}) == {("b", 0): task}


def test_a_part_with_the_key_of_another_task():
    """An alias of an expression's name for the fused task would be an alias of itself."""
    graph = {("x", 0): Task(("x", 0), int, 4), ("c", 0): fused(("c", 0))}
    for key in (("a", 0), ("b", 0)):
        named = {**graph, key: Alias(key, ("c", 0))}
        found = unfused(named)
        assert found[key] is named[key]
        assert run_of(found, key) == -5


def run_of(graph, key):
    return execute_graph(convert_legacy_graph(dict(graph)), keys=[key])[key]
