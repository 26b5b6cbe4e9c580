from __future__ import annotations

import gc

from dask_p2p.fusing.resident.commands import receive, workers_of


class Client:
    """Passes events to all functions that have subscribed."""

    def __init__(self):
        self.functions = []

    def subscribe_topic(self, topic, function):
        assert topic == "p2p-resident"
        self.functions.append(function)

    def log(self, gang, *ranks, resume=0):
        for function in self.functions[-1:]:  # Dask keeps one by topic
            function((0.0, {"gang": gang, "ranks": ranks, "resume": resume}))


class Gang:
    def __init__(self):
        self.found = []

    def record_ranks(self, ranks, resume):
        self.found.append((ranks, resume))


def test_a_receiver_gets_the_ranks_of_its_gang():
    client, first, second = Client(), Gang(), Gang()
    receive(client, "a", first)
    receive(client, "b", second)
    client.log("a", 1)
    client.log("b", 3)
    client.log("a", 4, resume=7)
    client.log("of another client", 5)
    assert (first.found, second.found) == ([((1,), 0), ((4,), 7)], [((3,), 0)])


def test_a_receiver_is_not_kept():
    client = Client()
    receive(client, "a", Gang())
    gc.collect()
    client.log("a", 1)


def test_workers_of_ranks():
    assert workers_of([("a", "x", 0), ("b", "y", 0), ("a", "z", 0)]) == {"a", "b"}
