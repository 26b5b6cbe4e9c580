"""The page /p2p, as Chromium shows it."""

import itertools
import time

import dask.array as da
import pytest
from dask.utils import format_bytes
from distributed import Event, wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.monitoring.records import Fallback, Stage
from dask_p2p.monitoring.runs import cells
from tests.browser import chromium, complaints, data, missing, until, visit, wait_for_bokeh
from tests.monitoring.support import record
from tests.support import import_path, persisted, spread

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

CLUSTER = {
    "n_workers": 2,
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",
    "env": {"PYTHONPATH": import_path()},
}
EVERY = """
    const every = root => [...root.querySelectorAll("*")].flatMap(
        e => e.shadowRoot ? [e, ...every(e.shadowRoot)] : [e]
    );
"""
IN_RUNS = """
    const data = Bokeh.documents[0].get_model_by_name("p2p-runs").data;
    const row = Array.from(data.name).indexOf(arguments[0]);
    return row >= 0 && data.state[row] == arguments[1] && data.progress[row] <= arguments[2];
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def page(client):
    return client.dashboard_link.rpartition("/")[0] + "/p2p"


def array(client):
    return spread(client, da.random.random((400, 300), chunks=(100, 300)))


def shown(driver, name, state="done", progress=1.0):
    until(driver, IN_RUNS, name, state, progress)
    columns = data(driver, "p2p-runs")
    row = columns["name"].index(name)
    return {column: values[row] for column, values in columns.items()}


def test_its_numbers_are_those_of_the_run(client, driver, page):
    visit(driver, page)
    y = persisted(client, dask_p2p.transpose(array(client)))
    row = shown(driver, y.name)
    (run,) = (run for run in dask_p2p.last_runs(client, n=100) if run.name == y.name)
    assert {name: row[name] for name in cells(run)} == cells(run) | {"state": "done"}
    values = [row[name] for name in ("operation", "dtype", "shape", "blocks")]
    assert values == ["p2p-transpose", "float64", "300 x 400", "4 of 4 x 1"]
    assert row["moved"] == format_bytes(400 * 300 * 8 // 2)
    shown_bars = bars(driver, y.name)
    assert sum(bar["nbytes"] for bar in shown_bars if bar["part"] == "transfer") == run.moved_bytes
    stops = [bar["stop_s"] for bar in shown_bars if bar["part"] == "task"]
    assert sorted(stops) == sorted(record.stop_s for record in run.made)
    assert complaints(driver) == []


def bars(driver, name):
    columns = data(driver, "p2p-stages")
    every = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return [bar for bar in every if bar["name"] == name]


DRAWN = """
    const [blocks, ...before] = arguments;
    const cells = every(document).filter(e => e.matches(".slick-row")).map(
        row => [...row.querySelectorAll(".slick-cell")].map(cell => cell.innerText)
    ).find(cells => cells.includes(blocks));
    return cells && before.every(other => other.join() != cells.join()) && cells;
"""


def test_a_run_is_shown_while_it_is_under_way(client, driver, page):
    """Its cells are also drawn again: the browser may have data that it does not show."""
    visit(driver, page)
    gate = Event("gate", client=client)

    def wait_at_gate(block):
        Event("gate").wait(200)
        return block

    y = dask_p2p.map_overlap(wait_at_gate, array(client), {0: 1}, "periodic", dtype=float)
    future = client.compute(y)
    try:
        row = shown(driver, y.name, "running", 0.99)
        assert (row["blocks"], row["fallbacks"]) == ("0 of 4 x 1", "0")
        assert bars(driver, y.name)
        cells = []
        for _ in range(3):
            cells.append(until(driver, EVERY + DRAWN, "0 of 4 x 1", *cells, limit_s=60))
    finally:
        gate.set()
    assert future.result().shape == (400, 300)
    assert shown(driver, y.name)["blocks"] == "4 of 4 x 1"
    until(driver, EVERY + DRAWN, "4 of 4 x 1", limit_s=60)
    assert complaints(driver) == []


TAB = "return Bokeh.documents[0].get_model_by_name('p2p-tabs').active == arguments[0]"


def test_steps_of_a_section_are_shown_while_it_runs(client, driver, page):
    visit(driver, page)
    shown(driver, persisted(client, dask_p2p.transpose(array(client))).name)
    until(driver, TAB, 0)
    gate = Event("gate-of-steps", client=client)

    def wait_at_gate(u, at):
        if at.step == 5:
            Event("gate-of-steps").wait(200)
        return u

    x = array(client)
    result = dask_p2p.iterate(wait_at_gate, {"u": x}, 0, 10)["u"].persist()
    try:
        until(driver, TAB, 1)
        until(driver, "return Bokeh.documents[0].get_model_by_name('p2p-steps').data.step.length")
        assert max(data(driver, "p2p-steps")["step"]) <= 6
        assert data(driver, "p2p-waiting")["rank"] == ["0", "1"]
    finally:
        gate.set()
    wait(result)
    shown(driver, persisted(client, dask_p2p.transpose(x + 1)).name)
    until(driver, TAB, 0)
    assert complaints(driver) == []


BRIGHTNESS = """
    const colour = getComputedStyle(document.documentElement).backgroundColor;
    return Math.max(...colour.match(/\\d+/g).slice(0, 3));
"""


def test_dark_where_the_user_likes_it_dark_and_light_on_a_click(driver, page):
    like = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", like)
    try:
        driver.get(page)
        brightness = {}
        for theme, other_theme in (("dark", "light"), ("light", "dark")):
            until(driver, "return location.search == arguments[0]", f"?theme={theme}")
            wait_for_bokeh(driver)
            brightness[theme] = driver.execute_script(BRIGHTNESS)
            to_other = driver.find_element("css selector", "#p2p-theme a")
            assert to_other.text == other_theme
            if theme == "dark":
                to_other.click()
        assert brightness["dark"] < 60 < 240 < brightness["light"]
        assert complaints(driver) == []
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("part", ["links", "stages", "runs", "steps", "waiting"])
def test_single_plots(driver, page, part):
    visit(driver, page.replace("/p2p", f"/individual-p2p-{part}"))
    until(driver, "return document.querySelector('.bk-Figure, .bk-DataTable').clientHeight > 300")
    assert complaints(driver) == []


def test_texts_of_workers_are_not_html(client, driver, page):
    """No tip and no cell makes the text of an error a part of the page."""
    visit(driver, page)
    evil = "<img src='' onerror='window.evil = 1'>"
    feed = client.cluster.scheduler.plugins[PLUGIN_NAME].feed
    stages = (Stage("tcp://b:1", "cma", 100, 0.1, 0.5),)
    fields = {"name": "p2p-<b>name</b>", "start_s": time.time(), "worker": "tcp://a:1"}
    failed = record(0, stages=stages, error=evil, **fields)
    finished_record = record(
        1, fallbacks=(Fallback("tcp://b:1", "ipc", evil),), dtype=evil, **fields
    )

    async def add():
        feed.records.add("name", 0, [failed, finished_record])

    client.sync(add)
    assert shown(driver, failed.name, "failed")["dtype"] == evil
    time.sleep(0.2)  # until it is drawn
    assert driver.execute_script("return window.evil") is None
    for plot in ("links", "stages"):
        visit(driver, page.replace("/p2p", f"/individual-p2p-{plot}"))
        texts = pointed_at(driver, "b:1" if plot == "links" else "<b>name</b>")
        assert evil in texts
        assert driver.execute_script("return window.evil") is None
    assert complaints(driver) == []


TIPS = """
    const texts = root => [...root.querySelectorAll("*")].flatMap(e => [
        ...(e.matches("[class*=ooltip]") ? [(e.shadowRoot || e).textContent] : []),
        ...(e.shadowRoot ? texts(e.shadowRoot) : []),
    ]);
    return texts(document).join(" ");
"""


def pointed_at(driver, text):
    """The tips of the first position, from above and from the left, whose tips have this text."""
    from selenium.webdriver.common.action_chains import ActionChains

    width, height = driver.execute_script("return [innerWidth, innerHeight]")
    for pause_s in (0.02, 0.1, 0.5):  # a busy machine draws tips later
        for y, x in itertools.product(range(1, 12), repeat=2):
            chain = ActionChains(driver, duration=0)
            chain.w3c_actions.pointer_action.move_to_location(width * x // 12, height * y // 12)
            chain.perform()
            time.sleep(pause_s)
            if text in (tips := driver.execute_script(TIPS)):
                return tips
    raise AssertionError(f"no tip has {text}")
