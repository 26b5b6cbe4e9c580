from __future__ import annotations

import re

import pytest

from dask_p2p.plugins.gangs.gathering import describe_shortage
from tests.sections.schedulers import Scheduler, ranks

GPU = {"GPU": 1}


@pytest.mark.parametrize(
    ("resources", "tasks"),
    [
        ([{}, {}], ranks(9, workers={"a"})),
        ([{}, {}], ranks(9, hosts={"host-b"})),
        ([{"GPU": 3}, {}], ranks(3, GPU)),
        ([{"GPU": 1}], ranks(10, {"GPU": 0.1})),
        ([GPU, GPU, GPU], [*ranks(2, GPU, workers={"a", "b"}), *ranks(1, GPU)]),
        ([GPU, {"TPU": 1}], [*ranks(1, GPU), *ranks(1, {"TPU": 1}), *ranks(3)]),
        ([GPU, GPU], ranks(2, GPU, workers={"gone"}, loose=True)),
    ],
)
def test_gangs_that_can_run(resources, tasks):
    assert describe_shortage(Scheduler(*resources), "x", tasks) == ""


@pytest.mark.parametrize(
    ("resources", "tasks", "text"),
    [
        (
            [GPU, GPU, {}],
            ranks(3, GPU),
            "x has 3 ranks, which run at the same time. 3 of them need 1 unit of resource 'GPU' "
            "each, and the workers have 2 units in all, enough for 2 ranks. Give ranks=2, or "
            "start workers with more units of 'GPU' and wait for them",
        ),
        ([{}, {}], ranks(2, GPU), "have 0 units in all, too few for any rank. Start workers"),
        (
            [{"GPU": 1, "m": 9}, {"GPU": 1}],
            ranks(2, {"GPU": 1, "m": 5}),
            "5 units of resource 'm' .* 9 units in all, enough for 1 rank. Give ranks=1",
        ),
        (
            [GPU, GPU],
            ranks(2, GPU, workers={"a"}),
            r"the workers that may run them \(a\) have 1 unit in all, enough for 1 rank",
        ),
        ([GPU, {}], ranks(2, GPU, workers={"b"}), r"\(b\) have 0 units in all"),
        ([GPU, {}], ranks(2, GPU, hosts={"host-a"}), r"\(host-a\) have 1 unit in all"),
        (
            [{}, {}],
            ranks(2, workers={"tcp://gone:1"}),
            r"2 of them are restricted to workers that the cluster does not have \(tcp://gone:1\). "
            "Name workers of the cluster by workers=, or give allow_other_workers=True",
        ),
        ([GPU], [*ranks(1), *ranks(1, workers={"gone"})], "1 of them are restricted to workers"),
        ([GPU], ranks(2, {"TPU": 1}, workers={"gone"}, loose=True), "resource 'TPU'"),
        ([GPU], [*ranks(3), *ranks(2, GPU)], "has 5 ranks.* 2 of them need 1 unit"),
    ],
)
def test_what_is_lacking_is_named(resources, tasks, text):
    assert re.search(text, describe_shortage(Scheduler(*resources), "x", tasks))


def test_many_ranks_are_looked_at_quickly():
    """Each restriction is checked once, for any number of ranks."""
    scheduler = Scheduler(*[GPU] * 8)
    scheduler.coerce_hostname = lambda host: requests.append(host) or host
    requests = []
    assert "enough for 8 ranks" in describe_shortage(scheduler, "x", ranks(5000, GPU))
    assert describe_shortage(scheduler, "x", ranks(5000, hosts={"host-a"})) == ""
    assert requests == ["host-a"]
