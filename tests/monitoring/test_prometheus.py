"""The pages /metrics of workers and schedulers, the dashboard for Grafana, Dask's fine metrics."""

import asyncio
import json
import re
from urllib.request import urlopen

import dask.array as da
import numpy as np
import pytest
import yaml
from distributed import performance_report
from distributed.metrics import context_meter

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring import metrics as prometheus
from dask_p2p.monitoring.metrics import COUNTERS, GAUGES, meter
from dask_p2p.monitoring.records import TaskRecord
from dask_p2p.plugins.registration import workers_of
from tests.docs.pages import ROOT
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


DEPLOY = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))
DOCUMENT = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
NAMES = r"\bdask_p2p_\w+"


@pytest.fixture(scope="module")
def labels():
    """Labels of all figures, by the names that the pages of a worker and a scheduler have."""
    from prometheus_client import generate_latest

    class Server:
        pass

    names = {}
    for kind in ("worker", "scheduler"):
        with pytest.MonkeyPatch.context() as patch:
            server = Server()
            patch.setattr(prometheus, "_page_server", lambda kind, server=server: server)
            families = [*COUNTERS, *GAUGES]
            values = {family.name: {"x": 1} for family in families}
            patch.setitem(prometheus.registered, server, lambda values=values: values)
            page = generate_latest(prometheus.Collector(kind)).decode()
        names |= dict(re.findall(r"^(\w+)(?:{(\w+)=)?.* 1\.0$", page, re.MULTILINE))
    return names


def expressions():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_figures_that_there_are(labels):
    named = {name for text in expressions() for name in re.findall(NAMES, text)}
    assert named <= set(labels)
    of_workers = {name for name in labels if "_cluster_" not in name}
    assert of_workers <= named, "all figures of workers are shown"
    (job,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "job")
    assert set(re.findall(NAMES, job["query"]["query"])) <= set(labels)


def test_the_dashboard_asks_for_labels_that_there_are(labels):
    label_names = {"instance"}
    for text in expressions():
        (names, by) = re.findall(NAMES, text), re.findall(r"by \((\w+)\)", text)
        assert set(by) <= label_names | {labels[name] for name in names}, text
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown == set(re.findall(r"by \((\w+)\)", target["expr"]))


def test_rates_are_of_counters_and_nothing_else():
    for text in expressions():
        for name in re.findall(rf"rate\(({NAMES})", text):
            assert name.endswith("_total")
        for name in re.findall(NAMES, text):
            if name.endswith("_total") and "_cluster_" not in name:
                assert f"rate({name}" in text


def test_the_documentation_lists_all_figures(labels):
    assert set(re.findall(NAMES, DOCUMENT)) == set(labels)
    rows = re.findall(rf"^\| `({NAMES})` \| `({NAMES})` \|([^|]*)\|", DOCUMENT, re.MULTILINE)
    assert len(rows) == len(COUNTERS) + len(GAUGES)
    for name, of_cluster, text in rows:
        assert of_cluster == name.replace("dask_p2p", "dask_p2p_cluster")
        assert re.findall(r"`(\w+)`", text)[:1] == ([labels[name]] if labels[name] else [])


def test_the_configuration_of_prometheus():
    configuration = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    assert set(jobs) == {"dask-scheduler", "dask-worker"}
    (files,) = jobs["dask-worker"]["file_sd_configs"]
    assert files["files"][0] in (DEPLOY / "README.md").read_text("utf-8")


def test_kernels_that_run_at_a_time_count_no_longer_than_their_thread():
    metrics = {}

    with context_meter.add_callback(lambda *metric: metrics.update({metric[::2]: metric[1]})):
        meter(TaskRecord(("x", 0), 10.0, 12.0, kernel_s=3.0))
    assert metrics["p2p-kernel", "seconds"] == 2.0


MOVED = ("p2p-transfer", "bytes")


def executed(client, name):
    """Dask's sums of the metrics of tasks, by activity and unit."""
    metrics = client.run_on_scheduler(
        lambda dask_scheduler: dict(dask_scheduler.cumulative_worker_metrics)
    )
    return {key[2:]: value for key, value in metrics.items() if key[:2] == ("execute", name)}


def moved_bytes(name, dask_worker):
    """Bytes in the metrics of a worker's tasks, whether the scheduler has them or not."""
    totals = dask_worker.digests_total.items()
    return sum(value for metric, value in totals if metric[2:] == (name, *MOVED))


def wait_for_heartbeats(client, name):
    """Wait until the scheduler has all metrics: a heartbeat may be on its way for some time."""

    def has_all():
        return executed(client, name).get(MOVED, 0) == sum(client.run(moved_bytes, name).values())

    wait_until(has_all)


def test_the_scheduler_and_reports_have_them(client, tmp_path):
    pytest.importorskip("bokeh")
    x = spread(client, da.ones((64, 48), chunks=(16, 48)))
    name = "p2p-transpose"
    dask_p2p.register(client)
    wait_for_heartbeats(client, name)
    before = executed(client, name)
    with performance_report(tmp_path / "report.html"):
        y = persisted(client, dask_p2p.transpose(x))
    assert "transfer time: " in (tmp_path / "report.html").read_text("utf-8")
    (run,) = dask_p2p.last_runs(client, n=1)
    assert run.name == y.name

    def added(*labels):
        return executed(client, name).get(labels, 0) - before.get(labels, 0)

    wait_for_heartbeats(client, name)
    wait_until(lambda: added(*MOVED) == run.least_bytes)
    stages = [stage for record in run.made for stage in record.stages]
    kernel_s = sum(r.kernel_s for r in run.made) + sum(stage.kernel_s for stage in stages)
    waited_s = sum(stage.waited_s for stage in stages)
    assert added("p2p-kernel", "seconds") == pytest.approx(kernel_s)
    assert added("p2p-transfer", "seconds") == pytest.approx(waited_s)
    durations_s = client.run_on_scheduler(
        lambda dask_scheduler: dict(dask_scheduler.task_prefixes[name].all_durations)
    )
    assert durations_s["transfer"] >= 0.9 * waited_s > 0
    spent_s = sum(record.stop_s - record.start_s for record in run.made)
    activities = ("p2p-kernel", "p2p-transfer", "thread-cpu", "thread-noncpu")
    assert sum(added(activity, "seconds") for activity in activities) >= 0.9 * spent_s
