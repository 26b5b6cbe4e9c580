"""Clusters over several hosts: transports between them, and transfers over bad links."""

import time
from itertools import permutations
from urllib.parse import urlsplit

import dask
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from tests.faults.support import (
    addresses,
    assert_nothing_is_held,
    expected,
    one_block_each,
    source,
)
from tests.hosts.cluster import BOUND_S, HostsCluster
from tests.hosts.network import Network, obstacle
from tests.support import persisted, run_of
from tests.tools.test_check import measure_little
from tests.transports.loopback import wait_until

SHAPE = (400, 600)
WORKERS = 4
MBIT = 100
DELAY_S = 0.05

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(obstacle() is not None, reason=f"no hosts can be made: {obstacle()}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Network(3) as network:
        cluster = HostsCluster(network, tmp_path_factory.mktemp("hosts"))
        for host in cluster.worker_hosts:
            cluster.start_workers(host, "--nworkers", "2")
        yield cluster
        assert "killed by signal" not in cluster.logs()


@pytest.fixture(scope="module")
def client(cluster):
    with cluster.client() as client:
        client.wait_for_workers(WORKERS, timeout=BOUND_S)
        dask_p2p.register(client)
        client.run(start_ucx)
        yield client


async def start_ucx(dask_worker):
    """Start UCX before anything waits for it: on a busy machine that takes long."""
    context = dask_worker.plugins[PLUGIN_NAME].context
    await context.offload(context.router.transports["ucx"].messenger)


@pytest.fixture(params=["comm", "ucx"])
def transport(request):
    with dask.config.set({"p2p.transports.order": [request.param]}):
        yield request.param


def host_of(address):
    return urlsplit(address).hostname


def laid_out(client, shape):
    """An array with a slab on each worker."""
    rows, columns = shape
    x = source(shape, (rows // WORKERS, columns))
    x = one_block_each(client, x, addresses(client))
    wait(x)
    return x


def pairs_of(client, y):
    """Return reader, holder and transport of each transfer."""
    return set(run_of(client, y).pairs)


def assert_transposed(client, shape=SHAPE):
    """Transpose, and return the pairs of workers that moved data."""
    y = persisted(client, dask_p2p.transpose(laid_out(client, shape)))
    np.testing.assert_array_equal(y.compute(), expected(shape).T)
    return pairs_of(client, y)


def test_transposes_and_rechunks(client, cluster, transport):
    before = [host.sent_bytes() for host in cluster.worker_hosts]
    x = laid_out(client, SHAPE)
    for y, result in (
        (dask_p2p.transpose(x), expected(SHAPE).T),
        (dask_p2p.rechunk(x, (SHAPE[0], 100)), expected(SHAPE)),
        (dask_p2p.rechunk(x, (70, 110)), expected(SHAPE)),
    ):
        y = persisted(client, y)
        pairs = pairs_of(client, y)
        assert {name for *_, name in pairs} == {transport}
        assert any(host_of(reader) != host_of(holder) for reader, holder, _ in pairs)
        np.testing.assert_array_equal(y.compute(), result)
    # At least half of each array has crossed the network, the only path between hosts.
    for host, sent in zip(cluster.worker_hosts, before, strict=True):
        assert host.sent_bytes() - sent > x.nbytes / 4


def test_memory_is_read_within_hosts_only(client):
    pairs = assert_transposed(client)
    ways = {(host_of(reader) == host_of(holder), name) for reader, holder, name in pairs}
    assert ways == {(True, "cma"), (False, "comm")}


def test_memory_of_gpus_is_never_offered_to_other_hosts(client):
    codes = client.run(obstacles_of_ipc, addresses(client))
    for reader, holder in permutations(addresses(client), 2):
        expected_code = "no-gpu" if host_of(reader) == host_of(holder) else "other-host"
        assert codes[reader][holder] == expected_code


async def obstacles_of_ipc(workers, dask_worker):
    """Return the codes of a worker's obstacles to others, from a thread as in tasks."""
    context = dask_worker.plugins[PLUGIN_NAME].context
    obstacle = context.router.transports["ipc"].obstacle
    peers = [worker for worker in workers if worker != dask_worker.address]
    return {
        peer: (await context.offload(obstacle, peer, "cupy", np.dtype("f8"))).code for peer in peers
    }


def test_a_check_names_the_transports_between_hosts(client):
    client.run(measure_little)
    report = dask_p2p.check(client)
    for link in report.links:
        if host_of(link.reader) == host_of(link.holder):
            assert link.transport == "cma"
        else:
            assert (link.transport, link.obstacles["cma"].code) == ("comm", "other-host")
    assert report.problems == []


@pytest.mark.parametrize("kind", ["slow", "with a delay"])
def test_a_bad_link(client, cluster, transport, kind):
    network, host = cluster.network, cluster.worker_hosts[0]
    if kind == "slow":
        shape, bad_link = (4000, 800), network.limited([host], MBIT)
        least_s = 4000 * 800 * 8 / 4 * 8 / (MBIT * 1e6)  # a quarter of the array crosses it
    else:
        shape, bad_link, least_s = SHAPE, network.delayed(host, DELAY_S), 2 * DELAY_S
    x = laid_out(client, shape)
    with bad_link:
        start_s = time.monotonic()
        y = persisted(client, dask_p2p.transpose(x))
        took_s = time.monotonic() - start_s
    assert took_s > least_s
    assert {name for *_, name in pairs_of(client, y)} == {transport}
    np.testing.assert_array_equal(y.compute(), expected(shape).T)


def test_a_link_too_slow_for_the_deadline(client, cluster):
    """A request for all regions would time out, so they are requested in smaller parts."""
    shape = (4000, 2000)
    x = laid_out(client, shape)
    settings = {"p2p.timeouts.request": "1 s", "p2p.transports.order": ["comm"], "p2p.attempts": 12}
    with cluster.network.limited(cluster.worker_hosts, MBIT / 2), dask.config.set(settings):
        y = persisted(client, dask_p2p.transpose(x))
    run = run_of(client, y)
    assert run.attempts > WORKERS, "the first attempts fail"
    np.testing.assert_array_equal(y.compute(), expected(shape).T)


@pytest.fixture
def on_second_interface(client, cluster):
    """A worker on each host that is reached by the other network."""
    before = set(addresses(client))
    for host in cluster.worker_hosts:
        cluster.start_workers(host, "--interface", "eth1")
    client.wait_for_workers(WORKERS + 2, timeout=BOUND_S)
    workers = sorted(set(addresses(client)) - before)
    yield workers
    client.retire_workers(workers)


def test_workers_on_a_second_interface(client, cluster, on_second_interface):
    assert {host_of(worker) for worker in on_second_interface} == {
        host.address(1) for host in cluster.worker_hosts
    }
    for transport in ("comm", "ucx"):
        before = [host.sent_bytes(1) for host in cluster.worker_hosts]
        x = one_block_each(client, source(SHAPE, (SHAPE[0] // 2, SHAPE[1])), on_second_interface)
        wait(x)
        with dask.config.set({"p2p.transports.order": [transport]}):
            y = persisted(client, dask_p2p.transpose(x))
        np.testing.assert_array_equal(y.compute(), expected(SHAPE).T)
        pairs = pairs_of(client, y)
        assert {(r, h) for r, h, _ in pairs} == set(permutations(on_second_interface, 2))
        assert {name for *_, name in pairs} == {transport}
        for host, sent in zip(cluster.worker_hosts, before, strict=True):
            assert host.sent_bytes(1) - sent > x.nbytes / 4
        del x, y


def test_a_host_that_loses_its_network_in_the_middle(client, cluster):
    shape = (4000, 2000)
    host, network = cluster.worker_hosts[1], cluster.network
    x = laid_out(client, shape)
    before_bytes = host.sent_bytes()
    results = []
    with network.limited([host], MBIT):
        for transport in ("comm", "ucx"):
            options = {"p2p.timeouts.request": "3 s", "p2p.transports.order": [transport]}
            with dask.config.set(options):
                y = dask_p2p.transpose(x, chunks=(500 - len(results), 4000))
                results.append(client.persist(y))
        wait_until(lambda: host.sent_bytes() - before_bytes > 2e6)
        with network.cut(host):
            wait(results, timeout=BOUND_S)
    assert {host_of(worker) for worker in addresses(client)} == {cluster.worker_hosts[0].address()}
    for y in results:
        np.testing.assert_array_equal(y.compute(), expected(shape).T)
    assert_nothing_is_held(client)
    host.stop()
    cluster.start_workers(host, "--nworkers", "2")
    client.wait_for_workers(WORKERS, timeout=BOUND_S)
    pairs = assert_transposed(client, (408, 600))
    assert any(host_of(holder) == host.address() for _, holder, _ in pairs)
