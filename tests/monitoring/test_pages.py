"""The pages are on the dashboard, however the plugin came onto the scheduler."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from types import SimpleNamespace
from urllib.request import urlopen

import dask
import dask.array as da
import pytest
from distributed import Client, LocalCluster

import dask_p2p
from dask_p2p.monitoring import pages as module
from dask_p2p.monitoring.pages import add_pages
from dask_p2p.task import PLUGIN_NAME
from tests.monitoring.support import OpenPage
from tests.support import in_process

PLOTS = [f"/individual-p2p-{part}" for part in ("links", "runs", "stages")]
IN_PROCESS = {"n_workers": 1, "threads_per_worker": 1, "processes": False}
NO_DASHBOARD = {"dashboard": False, "dashboard_address": ":0"}


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(**IN_PROCESS, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        yield client


def get(client, path):
    """The text of a page; an error unless it is 200."""
    port = client.cluster.scheduler.http_server.port
    with urlopen(f"http://127.0.0.1:{port}{path}") as page:
        return page.read().decode()


# First, while no page of another cluster is open: Bokeh has one switch for the checks of
# properties, for all event loops of a process, and dashboards that update at once may leave it off.
@pytest.mark.parametrize("prefix", ["", "/some/prefix"])
def test_by_preload(prefix):
    with (
        dask.config.set({"distributed.scheduler.preload": ["dask_p2p.preload"]}),
        LocalCluster(
            **IN_PROCESS,
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"http_prefix": prefix},
        ) as cluster,
        Client(cluster) as client,
    ):
        check_pages(client, prefix)


def test_closing_the_last_page_ends_the_questions(client):
    async def close_all(dask_scheduler):
        """Do what bokeh does some time after the last browser has gone."""
        running = [dask_scheduler.plugins[PLUGIN_NAME].feed.is_running]
        for app in dask_scheduler.http_application.applications:
            for path in getattr(app, "app_paths", ()):
                for session in app.get_sessions(path):
                    context = app.applications[path]
                    await context._discard_session(session, lambda session: True)
        return [*running, dask_scheduler.plugins[PLUGIN_NAME].feed.is_running]

    get(client, "/p2p")
    assert client.run_on_scheduler(close_all) == [True, False]
    get(client, "/p2p")
    assert client.run_on_scheduler(close_all) == [True, False]


def check_pages(client, prefix=""):
    for path in ("/p2p", *PLOTS):
        assert "#p2p-theme" in get(client, f"{prefix}{path}")
    listed = json.loads(get(client, f"{prefix}/individual-plots.json"))
    assert {name: path for name, path in listed.items() if "P2P" in name} == {
        path.strip("/").replace("-", " ").title(): path for path in PLOTS
    }
    status = get(client, f"{prefix}/status")
    assert status.count('<a href="p2p">') == 1
    for path in PLOTS:
        assert status.count(f'href="{path.strip("/")}"') == 1


def test_a_client_registers_on_a_running_cluster(client):
    check_pages(client)


def test_registering_again_changes_nothing(client):
    async def take_off(dask_scheduler):
        await dask_scheduler.unregister_worker_plugin(None, PLUGIN_NAME)
        dask_scheduler.remove_plugin(PLUGIN_NAME)

    dask_p2p.register(client)
    check_pages(client)
    client.run_on_scheduler(take_off)
    try:
        assert "#p2p-theme" in get(client, "/p2p")
    finally:
        dask_p2p.register(client)
    check_pages(client)


def test_a_theme_is_one_of_two(client):
    dark, light = get(client, "/p2p?theme=dark"), get(client, "/p2p")
    assert "background: #1c1e21" in dark
    assert "background: #fafafa" in light
    for wrong in ("", "x", "%ff", "<script>"):
        assert "background: #fafafa" in get(client, f"/p2p?theme={wrong}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_runs_leave_the_scheduler_flat(client):
    """With a page open, once it and the worker keep as many records as they ever will."""
    import tracemalloc

    feed = client.cluster.scheduler.plugins[PLUGIN_NAME].feed
    page = OpenPage()
    x = client.persist(da.ones((8, 6), chunks=(4, 6)))

    def kept_bytes(runs):
        for i in range(runs):
            client.compute(dask_p2p.transpose(x + i)).result()
        del page.shown[:]
        gc.collect()
        mine = tracemalloc.Filter(inclusive=True, filename_pattern="*/dask_p2p/*")
        statistics = tracemalloc.take_snapshot().filter_traces([mine]).statistics("filename")
        return sum(found.size for found in statistics)

    async def look():
        (worker,) = client.cluster.workers.values()
        worker.plugins[PLUGIN_NAME].context.records._size = feed._records._size = 100
        feed.watch(page)

    async def look_away():
        feed.unwatch(page)

    client.sync(look)
    tracemalloc.start()
    try:
        some = kept_bytes(100)
        assert len(feed._records) == 100
        # Caches keep the runs' names, up to a number.
        assert kept_bytes(900) < some + 1e6
    finally:
        tracemalloc.stop()
        client.sync(look_away)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "distributed.scheduler")
    logging.getLogger("distributed").addHandler(caplog.handler)  # which does not pass things on
    yield caplog
    logging.getLogger("distributed").removeHandler(caplog.handler)


def test_without_bokeh_there_is_a_line_in_the_log(log, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert not add_pages(SimpleNamespace(), lambda: None)
    assert set(log.messages) == {"dask_p2p: no page /p2p on the dashboard, which needs bokeh"}


def test_without_a_dashboard_nothing_is_said(log):
    scheduler = SimpleNamespace(http_application=SimpleNamespace(applications=[]))
    assert not add_pages(scheduler, lambda: None)
    assert log.messages == []


def test_with_another_dask_there_is_a_warning(log):
    assert not add_pages(SimpleNamespace(), lambda: None)
    assert "no page /p2p on the dashboard: 'types.SimpleNamespace' object" in log.messages[0]


def test_a_cluster_without_a_dashboard_works():
    async def main():
        async with in_process(1, scheduler_kwargs=NO_DASHBOARD) as (_, client):
            await dask_p2p.register(client)
            y = dask_p2p.transpose(da.ones((8, 6), chunks=(2, 6)))
            assert (await client.compute(y)).shape == (6, 8)

    asyncio.run(main())
