import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import dask
import pytest
from distributed import Client

import dask_p2p
from dask_p2p.backends.base import HostLink
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import Obstacle
from dask_p2p.plugins.registration import workers_of
from dask_p2p.tools import check as check_module
from dask_p2p.tools.check import Link, Problem, Report, find_problems
from dask_p2p.transports.base import most_probe_bytes
from dask_p2p.tuning import Tuning
from tests.clock import Clock
from tests.support import given_up, own_client, tune_here

VERSIONS = {"dask": "1", "cupy": "14", "ucxx": None}
GOOD = {
    "address": "a",
    "host": "node",
    "kind": "cupy",
    "gpu": "NVIDIA H200",
    "mig": False,
    "memory_resource": "PoolMemoryResource",
    "pool_bytes": 2**30,
    "cupy_uses_rmm": True,
    "link_gbs": 450.0,
    "versions": VERSIONS,
}
LINK = Link("a", "b", "ipc", 330.0, 1e-3)


def test_a_good_cluster_has_no_problems():
    assert find_problems([GOOD, GOOD | {"address": "b"}], [LINK], VERSIONS) == []
    client_versions = {**VERSIONS, "cupy": None, "ucxx": "0.52"}  # which nobody can compare
    assert find_problems([GOOD], [], client_versions) == []


@pytest.mark.parametrize(
    ("changes", "words", "cure"),
    [
        ({"pool_bytes": 2**30 + 256}, "not a multiple of 2 MiB", "rmm_pool_size"),
        ({"memory_resource": "CudaAsyncMemoryResource"}, "CudaAsyncMemoryResource", "multiple"),
        ({"memory_resource": "ManagedMemoryResource"}, "ManagedMemoryResource", "multiple"),
        ({"memory_resource": None}, "does not come from a pool", "rmm_pool_size"),
        ({"cupy_uses_rmm": False}, "not allocate from RMM's pool", "external_lib_list"),
        ({"mig": True}, "MIG", "whole GPUs"),
        ({"cannot_pin": "OSError: no"}, "cannot be pinned (OSError: no)", "ulimit -l, and memory"),
        ({"versions": {**VERSIONS, "dask": "2"}}, "dask 2, here 1", "the same versions everywhere"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_each_cause_is_named_once_with_its_cure(changes, words, cure):
    workers = [GOOD | {"address": address, **changes} for address in "ab"]
    (problem,) = find_problems(workers, [LINK], VERSIONS)
    assert words in problem.fault
    assert cure in problem.cure
    assert problem.workers == ("a", "b")


def test_the_rates_of_copies_are_in_the_table_of_workers():
    workers = [GOOD, GOOD | {"address": "b", "host_link": HostLink(55.25, 54.0, 102.0)}]
    _, head, first, second, *_ = str(Report(workers, [LINK], [])).splitlines()
    assert head.endswith("to, from GPU, both, GB/s")
    assert first.split()[-1] == "-"
    assert second.endswith("55.2, 54, 102")


def test_a_host_link_is_measured_by_the_backend(monkeypatch):
    threads = []

    class Gpu:
        def host_link(self, warn):
            threads.append(threading.current_thread())
            warn("host memory cannot be pinned", "OSError: no")
            warn("host memory cannot be pinned", "again")

        def device_status(self):
            return {"kind": "cupy"}

    def cannot_pin():
        status = asyncio.run(check_module._status(SimpleNamespace(address="a")))
        assert (status["kind"], status["host_link"]) == ("cupy", None)
        return status["cannot_pin"]

    monkeypatch.setattr(check_module, "worker_backend", Gpu)
    assert cannot_pin() == "OSError: no"
    assert threading.current_thread() not in threads, "it is not for event loops"
    monkeypatch.setattr(Gpu, "host_link", Mock(side_effect=MemoryError))
    assert cannot_pin() is None


@pytest.mark.parametrize("code", ["other-namespace", "no-peer-access", "failed"])
def test_obstacles_between_workers_have_remedies(code):
    obstacle = Obstacle(code, "something is in the way", "Take it away")
    links = [
        replace(LINK, reader=reader, transport="comm", obstacles={"ipc": obstacle})
        for reader in "aab"
    ]
    problem = Problem(("a", "b"), "ipc is not used: something is in the way", "Take it away")
    assert find_problems([GOOD], links, VERSIONS) == [problem]


@pytest.mark.parametrize("code", ["other-kind", "same-process", "other-host"])
def test_what_is_as_it_should_be_is_no_problem(code):
    link = replace(LINK, transport="comm", obstacles={"ipc": Obstacle(code, "...")})
    assert find_problems([GOOD], [link], VERSIONS) == []


FAR_LINKS = [
    Link("a", "b", "cma", 3.0, 1e-4),
    Link("b", "a", "cma", 5.0, 1e-4),
    *(
        Link(reader, holder, "comm", 0.5, 2e-3, {"cma": Obstacle("other-host", "on <others>")})
        for reader, holder in (("a", "c"), ("b", "c"))
    ),
    Link("c", "a", None, 0.0, 0.0, error="TransferError: no answer"),
    Link("c", "b", "comm", 0.5, 2e-3, {"ucx": Obstacle("not-installed", "no ucxx")}),
]


def test_hosts_in_pairs():
    hosts = {"a": "one", "b": "one", "c": "two"}
    workers = [GOOD | {"address": address, "host": host} for address, host in hosts.items()]
    report = Report(workers, FAR_LINKS, find_problems(workers, FAR_LINKS, VERSIONS))
    text = repr(report)
    assert text == str(report)
    lines = text.splitlines()
    rows = [" ".join(line.split()) for line in lines[lines.index("Between hosts") + 2 :][:3]]
    assert rows == [
        "one one cma 2 4 0.10 -",
        "one two comm 2 0.5 2.00 cma: on <others>",
        "two one none 1, comm 1 0.25 2.00 ucx: no ucxx; TransferError: no answer",
    ]
    assert not any("on <others>" in problem.fault for problem in report.problems)
    html = report._repr_html_()
    assert html.count("<table>") == 3, "workers, hosts and pairs of workers"
    assert "cma: on &lt;others&gt;" in html
    assert "<others>" not in html
    assert "Worker 2: no transport brings blocks from a" in text
    assert "No problems found." in repr(Report(workers, FAR_LINKS, []))


def measure_little():
    """Measure small blocks, and find no transport quicker than the first one."""
    from dask_p2p.tools import check

    tune_here(check_speed_up=1e9)
    check.most_probe_bytes = lambda *_: 2**20


def measure_well():
    from dask_p2p.tools import check

    tune_here(check_speed_up=Tuning.check_speed_up)
    check.most_probe_bytes = most_probe_bytes


@pytest.fixture
def calm(client):
    """A client of workers whose measurements a busy machine does not change."""
    client.run(measure_little)
    yield client
    client.run(measure_well)


def test_a_cluster(calm):
    dask_p2p.register(calm)
    report = dask_p2p.check(calm)
    addresses = sorted(workers_of(calm))
    assert [worker["address"] for worker in report.workers] == addresses
    assert {(link.reader, link.holder) for link in report.links} == {
        (a, b) for a in addresses for b in addresses if a != b
    }
    for link in report.links:
        assert (link.transport, link.error) == ("cma", None), given_up(calm)
        assert link.gbs > 0
        assert 0 < link.latency_s < 10
    assert report.problems == []
    assert {worker["host_link"] for worker in report.workers} == {None}, "they have no GPUs"
    lines = str(report).splitlines()
    titles = [line for line in lines if line.startswith("Transport, GB/s")]
    first, second = lines[lines.index(*titles) + 2 :][:2]
    assert first.split()[:4] == ["to", "0", "-", "cma"]
    assert second.split()[:3] == ["to", "1", "cma"]
    assert (first.count("cma"), second.count("cma")) == (3, 3)
    assert set(leased_bytes(calm).values()) == {0}


def leased_bytes(client):
    return client.run(lambda dask_worker: dask_worker.plugins[PLUGIN_NAME].leased_bytes)


def test_the_transport_is_what_a_task_would_use(calm):
    dask_p2p.register(calm)
    with dask.config.set({"p2p.transports.order": ["ucx"]}):
        report = dask_p2p.check()
    assert {link.transport for link in report.links} == {"ucx"}
    assert {link.transport for link in dask_p2p.check(calm).links} == {"cma"}, given_up(calm)


def test_a_plugin_that_was_missing():
    # With two ways, a busy machine may make one look slow, which is a problem that is told.
    with dask.config.set({"p2p.transports.order": ["comm"]}), own_client() as client:
        client.run(measure_little)
        report = dask_p2p.check(client)
        assert set(leased_bytes(client).values()) == {0}, "also of what proved the ways"
        assert report.problems == [], "it has been registered, and nothing is left to do"
        assert "No problems found." in str(report)


def slow_down():
    """Have all blocks come late by cma, and all others in a tick of the clock.

    Measure them only once, and small ones.
    """
    from dask_p2p.tools import check
    from dask_p2p.transports.in_place import CmaTransport

    tune_here(check_repeats=1)
    check.most_probe_bytes = lambda *_: 2**20
    check.time = clock = TickingClock()
    opened = CmaTransport.regions

    def opened_late(*args):
        clock.advance(0.4)
        return opened(*args)

    CmaTransport.regions = opened_late


class TickingClock(Clock):
    def perf_counter(self):
        self.advance(0.001)
        return self.now_s


def test_a_transport_that_is_quicker_by_far_is_named():
    with own_client() as client:
        dask_p2p.register(client)
        client.run(slow_down)
        report = dask_p2p.check(client)
        assert {(link.transport, link.quicker) for link in report.links} == {("cma", "comm")}
        (problem,) = report.problems
        assert problem.fault == "comm is more than 2 times as fast as cma"
        assert "Put it first in p2p.transports.order" in problem.cure
        with dask.config.set({"p2p.transports.order": ["comm", "cma"]}):
            report = dask_p2p.check(client)
        assert {(link.transport, link.quicker) for link in report.links} == {("comm", None)}
        assert report.problems == []


async def test_an_asynchronous_client(calm, cluster):
    async with Client(cluster.scheduler_address, asynchronous=True) as client:
        report = await dask_p2p.check(client)
    assert len(report.links) == 12
    assert {link.error for link in report.links} == {None}
