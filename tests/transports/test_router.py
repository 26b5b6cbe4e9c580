import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dask_p2p.errors import Obstacle, TransferError
from dask_p2p.transports.router import Router
from tests.support import BOUND_S

DTYPE = np.dtype("f4")


class FakeTransport:
    def __init__(self, name, obstacles):
        self.name = name
        self.obstacles = obstacles  # by (holder, kind)
        self.fails = {}  # by holder: what a probe raises
        self.probed = []
        self.forgotten = []
        self.boot_ids = {}  # by worker

    def boot_id(self, worker):
        return self.boot_ids.get(worker)

    def obstacle(self, holder, kind, dtype):
        assert dtype == DTYPE
        return self.obstacles.get((holder, kind))

    def probe(self, holder, kind):
        self.probed.append((holder, kind))
        if holder in self.fails:
            raise self.fails[holder]

    def on_worker_left(self, holder):
        self.forgotten.append(holder)


@pytest.fixture
def warnings_sent():
    return []


@pytest.fixture
def ipc():
    return FakeTransport("ipc", {("a", "numpy"): "no GPU", ("far", "cupy"): "another host"})


@pytest.fixture
def router(ipc, warnings_sent):
    return Router({"ipc": ipc, "comm": FakeTransport("comm", {})}, warnings_sent.append)


def find_routes(router, holders, kind="cupy"):
    return router.find_routes(holders, kind, DTYPE, ("ipc", "comm"))


def routes(router, holders, kind="cupy"):
    return [(route.holder, route.transport.name) for route in find_routes(router, holders, kind)]


def test_a_failure_is_reported_once_and_kept_to_its_holder(router, warnings_sent):
    error = TransferError("ipc: a could not send block k: why", reason="why")
    router.record_failure(find_routes(router, ("a",))[0], error, last=False)
    assert warnings_sent == ["dask_p2p: ipc fails, another transport is used instead: why"]
    assert router.failures.get(("a", "ipc")) == Obstacle("failed", str(error))
    assert routes(router, ("a", "b")) == [("a", "comm"), ("b", "ipc"), ("b", "comm")]
    route, _ = find_routes(router, ("b",))
    router.record_failure(route, TransferError("of b", reason="why"), last=False)
    assert len(warnings_sent) == 1
    (last_route,) = find_routes(router, ("b",))
    router.record_failure(last_route, error, last=True)
    assert last_route.transport.name == "comm"
    assert router.failures.get(("b", "comm")) is None
    assert len(warnings_sent) == 1
    router.on_worker_left("a")
    assert router.failures.get(("a", "ipc")) is None
    assert routes(router, ("a",)) == [("a", "ipc"), ("a", "comm")]


def test_the_log_names_the_pair_the_reason_and_the_remedy(ipc, caplog):
    router = Router({"ipc": ipc, "comm": FakeTransport("comm", {})}, lambda text: None, "me")
    error = TransferError("no mapping.", obstacle=Obstacle("code", "no mapping", "Do this"))
    route, _ = find_routes(router, ("a",))
    for _ in range(2):
        router.record_failure(route, error, last=False)
    (log_record,) = (record for record in caplog.records if record.name.startswith("dask_p2p"))
    assert log_record.levelname == "WARNING"
    assert log_record.getMessage() == (
        "me reads from a by another transport than ipc, which failed: no mapping. Do this."
    )
    assert router.list_failed("a", "comm", ("ipc", "comm")) == [("ipc", error.obstacle)]
    assert router.list_failed("a", "ipc", ("ipc", "comm")) == []
    assert router.list_failed("b", "comm", ("ipc", "comm")) == []


def test_a_way_is_proved_once_for_each_holder_and_kind(router, ipc):
    for _ in range(3):
        routes(router, ("a", "b"))
    assert ipc.probed == [("a", "cupy"), ("b", "cupy")]
    routes(router, ("b",), "numpy")
    assert ipc.probed == [("a", "cupy"), ("b", "cupy"), ("b", "numpy")]
    router.on_worker_left("b")
    routes(router, ("a", "b"))
    assert ipc.probed[3:] == [("b", "cupy")]
    assert ipc.forgotten == ["b"]


def test_a_worker_leaves_while_another_is_met(router):
    """What is learnt of one is noted just when what was learnt of the other is looked for."""
    meeting = threading.Thread(target=routes, args=(router, ("new",)))

    class Watched(type(router.proofs)):
        def __iter__(self):
            for proof in super().__iter__():
                if meeting.ident is None:
                    meeting.start()
                meeting.join(0.2)
                yield proof

    routes(router, ("gone", "stays"))
    router.proofs = Watched(router.proofs.default_factory, router.proofs)
    router.on_worker_left("gone")
    meeting.join(BOUND_S)
    assert {holder for holder, *_ in router.proofs} == {"stays", "new"}


def test_a_worker_that_leaves_while_it_is_met_is_forgotten(router, ipc):
    ipc.probe = lambda holder, kind: router.on_worker_left(holder)
    routes(router, ("gone",))
    assert not router.proofs


def test_threads_that_need_a_way_at_once_prove_it_once(router, ipc):
    started, go_on = threading.Event(), threading.Event()
    original = ipc.probe

    def probe(holder, kind):
        original(holder, kind)
        started.set()
        assert go_on.wait(BOUND_S)

    ipc.probe = probe
    with ThreadPoolExecutor(3) as threads:
        results = [threads.submit(routes, router, ("a",)) for _ in range(3)]
        assert started.wait(BOUND_S)
        go_on.set()
    assert [result.result() for result in results] == [[("a", "ipc"), ("a", "comm")]] * 3
    assert ipc.probed == [("a", "cupy")]


def test_a_way_that_fails_its_proof_is_not_used(router, ipc, warnings_sent):
    ipc.fails["a"] = TransferError("it came changed")
    assert routes(router, ("a", "b")) == [("a", "comm"), ("b", "ipc"), ("b", "comm")]
    assert warnings_sent == [
        "dask_p2p: ipc fails, another transport is used instead: it came changed"
    ]
    routes(router, ("a",))
    assert ipc.probed == [("a", "cupy"), ("b", "cupy")]


def test_a_holder_that_does_not_answer_proves_nothing(router, ipc, warnings_sent):
    ipc.fails["a"] = TransferError("no answer", scope="block")
    assert routes(router, ("a",)) == [("a", "ipc"), ("a", "comm")]
    assert warnings_sent == []
    del ipc.fails["a"]
    routes(router, ("a",))
    assert ipc.probed == [("a", "cupy"), ("a", "cupy")]


def test_hosts_are_told_by_addresses(router):
    workers = ["tcp://10.0.0.1:40", "tcp://10.0.0.1:41", "tcp://10.0.0.2:40", "no address"]
    names = router.find_hosts(workers)
    assert [*names] == workers
    assert names[workers[0]] == names[workers[1]]
    assert len(set(names.values())) == 3


def test_one_host_may_have_several_addresses(router, ipc):
    workers = [f"tcp://10.0.{network}.{host}:40" for network in (1, 2) for host in (5, 6)]
    ipc.boot_ids = {worker: worker.split(".")[3] for worker in workers}
    names = router.find_hosts(workers)
    assert names[workers[0]] == names[workers[2]] == "10.0.1.5"
    assert names[workers[1]] == names[workers[3]] == "10.0.1.6"
    assert router.find_hosts(reversed(workers)) == names, "whoever asks gets the same names"
