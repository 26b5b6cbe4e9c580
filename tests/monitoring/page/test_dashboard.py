"""The pages are on the dashboard, however the plugin came onto the scheduler."""

import json
import logging
import time
from contextlib import closing
from types import SimpleNamespace
from urllib.request import urlopen

import dask
import dask.array as da
import pytest

import dask_p2p
from dask_p2p import monitoring as module
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring import add_pages
from tests.support import in_process, noted, own_client
from tests.transports.loopback import wait_until

# Of Bokeh's client, which makes an event loop for this thread, on Python 3.12 and 3.13.
pytestmark = pytest.mark.filterwarnings("ignore:There is no current event loop:DeprecationWarning")

PLOTS = [f"/individual-p2p-{part}" for part in ("links", "runs", "stages", "steps", "waiting")]
CLUSTER = {
    "n_workers": 1,
    "threads_per_worker": 1,
    "processes": False,
    "dashboard_address": "127.0.0.1:0",
}
NO_DASHBOARD = {"dashboard": False, "dashboard_address": ":0"}


def url_of(client, path):
    return f"http://127.0.0.1:{client.cluster.scheduler.http_server.port}{path}"


def get(client, path):
    """The text of a page; an error unless it is 200."""
    with urlopen(url_of(client, path)) as page:
        return page.read().decode()


# First, while no page of another cluster is open: Bokeh has one switch for the checks of
# properties, for all event loops of a process, and dashboards that update at once may leave it off.
@pytest.mark.parametrize("prefix", ["", "/some/prefix"])
def test_by_preload(prefix):
    with (
        dask.config.set({"distributed.scheduler.preload": ["dask_p2p.preload"]}),
        own_client(**CLUSTER, scheduler_kwargs={"http_prefix": prefix}) as client,
    ):
        check_pages(client, prefix)


@pytest.fixture
def request_times(client, monkeypatch):
    """When the rounds began in which workers were asked, by the clock of the feed."""
    feed = client.cluster.scheduler.plugins[PLUGIN_NAME].feed
    return noted(monkeypatch, feed, "ask", lambda worker: feed.last_round_s)


def test_no_worker_is_asked_after_the_plugin_was_removed(client, request_times):
    from bokeh.client import pull_session

    with closing(pull_session(url=url_of(client, "/p2p"))):  # as a browser keeps it open
        wait_until(lambda: request_times)
        client.run_on_scheduler(take_off)
        try:
            count = len(request_times)
            time.sleep(1)
            assert len(request_times) == count
        finally:
            dask_p2p.register(client)
        # The page goes on with the plugin that is there now.
        plugin = client.cluster.scheduler.plugins[PLUGIN_NAME]
        wait_until(lambda: plugin.feed.last_round_s > 0)


async def take_off(dask_scheduler):
    await dask_scheduler.unregister_worker_plugin(None, PLUGIN_NAME)
    dask_scheduler.remove_plugin(PLUGIN_NAME)


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


def test_registering_again_changes_nothing(client):
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
    assert "color-scheme: dark" in dark
    assert "color-scheme: light" in light
    for theme in ("", "x", "%ff", "<script>", "dark&theme=dark"):
        assert "color-scheme: light" in get(client, f"/p2p?theme={theme}")


@pytest.fixture
def log(own_log):
    own_log.set_level(logging.INFO, "distributed.scheduler")
    logging.getLogger("distributed").addHandler(own_log.handler)  # which does not pass things on
    yield own_log
    logging.getLogger("distributed").removeHandler(own_log.handler)


def test_without_bokeh_there_is_a_line_in_the_log(log, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    add_pages(SimpleNamespace(), lambda: None)
    (message,) = set(log.messages)
    assert message.startswith(
        "dask_p2p: no page /p2p on the dashboard, which needs bokeh. Run: pip"
    )


def test_with_another_dask_there_is_a_warning_and_without_a_dashboard_none(log):
    scheduler = SimpleNamespace(http_application=SimpleNamespace(applications=[]))
    add_pages(scheduler, lambda: None)
    assert log.messages == []
    add_pages(SimpleNamespace(), lambda: None)
    assert "no page /p2p on the dashboard: 'types.SimpleNamespace' object" in log.messages[0]


async def test_a_cluster_without_a_dashboard_works():
    async with in_process(1, scheduler_kwargs=NO_DASHBOARD) as (_, client):
        await dask_p2p.register(client)
        y = dask_p2p.transpose(da.ones((8, 6), chunks=(2, 6)))
        assert (await client.compute(y)).shape == (6, 8)
