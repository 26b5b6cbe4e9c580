"""The pages /metrics of workers and schedulers."""

from __future__ import annotations

import asyncio
from urllib.request import urlopen

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring import metrics as prometheus
from dask_p2p.monitoring.metrics import COUNTERS, GAUGES
from dask_p2p.plugins.registration import workers_of
from tests.support import in_process, persisted, spread
from tests.transports.loopback import true_later, wait_until

parser = pytest.importorskip("prometheus_client.parser")


def read_page(url):
    """Values of the package's figures on a page, by name and label."""
    with urlopen(url, timeout=60) as page:
        text = page.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("dask_p2p")
    }


def test_workers_and_the_scheduler_export_moved_bytes(cluster, client):
    x = spread(client, da.ones((64, 48), chunks=(16, 48)))
    dask_p2p.register(client)
    scheduler = cluster.dashboard_link.replace("/status", "/metrics")
    workers = {
        address: f"http://127.0.0.1:{worker['services']['dashboard']}/metrics"
        for address, worker in workers_of(client).items()
    }
    attempts = "dask_p2p_cluster_attempts_total", "p2p-transpose"
    own_attempts = "dask_p2p_attempts_total", "p2p-transpose"

    def wait_for_figures(at_least=0):
        """Return the scheduler's and the workers' figures, when the scheduler has all records."""
        figures = []

        def look_once():
            pages = {worker: read_page(url) for worker, url in workers.items()}
            figures[:] = read_page(scheduler), pages
            counted = figures[0].get(attempts, 0)
            return counted == sum(page.get(own_attempts, 0) for page in pages.values()) >= at_least

        wait_until(look_once)
        return figures

    before, of_workers = wait_for_figures()
    persisted(client, dask_p2p.map_on_gpu(np.sqrt, x, fallback="numpy"))
    y = dask_p2p.transpose(x)
    y = persisted(client, y)
    (run,) = dask_p2p.last_runs(client, n=1)
    assert run.name == y.name
    after, pages = wait_for_figures(at_least=before.get(attempts, 0) + 4)
    for name in ("attempts", "tasks"):
        figure = f"dask_p2p_cluster_{name}_total", "p2p-transpose"
        assert after[figure] - before.get(figure, 0) == 4
    for worker, page in pages.items():
        for transport in run.transports:
            figure = "dask_p2p_received_bytes_total", transport
            moved = sum(n for pair, n in run.pairs.items() if pair[::2] == (worker, transport))
            assert page.get(figure, 0) - of_workers[worker].get(figure, 0) == moved
        spent = "dask_p2p_task_seconds_total", "p2p-transpose"
        made_s = sum(r.stop_s - r.start_s for r in run.made if r.worker == worker)
        assert page[spent] - of_workers[worker].get(spent, 0) == pytest.approx(made_s)
    for family in COUNTERS:
        name = f"{family.name}_total"
        worker_keys = {
            key for page in pages.values() for key in page if key[0] == f"dask_p2p_{name}"
        }
        assert worker_keys or family.name == "fallbacks", name
        for key in worker_keys:
            total = after[f"dask_p2p_cluster_{name}", *key[1:]]
            former_workers = total - sum(page.get(key, 0) for page in pages.values())
            assert former_workers >= -1e-6, "of workers that have left"
    for family in GAUGES:
        assert any(key[0] == f"dask_p2p_cluster_{family.name}" for key in after), family.name


async def test_servers_of_one_process_export_their_own_figures():
    async with in_process(worker_dashboard_address=":0") as (cluster, client):
        link = cluster.dashboard_link.replace("/status", "/metrics")

        async def pages():
            ports = [worker.http_server.port for worker in cluster.workers.values()]
            urls = [link, *(f"http://127.0.0.1:{port}/metrics" for port in ports)]
            return [await asyncio.to_thread(read_page, url) for url in urls]

        assert await pages() == [{}, {}, {}], "without the plugin"
        await dask_p2p.register(client)
        await client.compute(dask_p2p.transpose(da.ones((8, 6), chunks=(2, 6))))
        for _ in range(2):  # the pages before were of others
            _, *of_workers = await pages()
            figure = "dask_p2p_attempts_total", "p2p-transpose"
            attempts = [page.get(figure, 0) for page in of_workers]
            counted = [
                worker.plugins[PLUGIN_NAME].context.counters.values()["attempts"]
                for worker in cluster.workers.values()
            ]
            assert attempts == [values.get("p2p-transpose", 0) for values in counted]
            assert sum(attempts) == 4

        async def first_page():
            return (await pages())[0]

        await true_later(first_page)  # by the next heartbeat
        await client.unregister_worker_plugin(PLUGIN_NAME)
        _, *of_workers = await pages()
        assert not any(figure in page for page in of_workers)
        await client.unregister_scheduler_plugin(PLUGIN_NAME)
        assert (await pages())[0] == {}
    async with in_process(worker_dashboard_address=":0") as (_, client):
        await dask_p2p.register(client)  # collectors are there already


@pytest.mark.parametrize("kind", ["worker", "scheduler"])
def test_a_process_whose_page_has_not_been_read_yet(kind, monkeypatch):
    monkeypatch.setattr(prometheus, "_page_server", lambda kind: None)
    assert list(prometheus.Collector(kind).collect()) == []
