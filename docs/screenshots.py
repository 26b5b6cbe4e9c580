"""Make the pictures of the dashboard's page: ``PYTHONPATH=. python docs/screenshots.py``.

Needs Chromium with its driver, and the extra ``test``. The figures in the pictures are those of a
run on the machine that it runs on, with six workers on its CPUs.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
from distributed import Client, LocalCluster, wait

import dask_p2p
from tests.browser import chromium, until, visit

IMAGES = Path(__file__).parent / "images"
SIZE = (1500, 950)
WORKERS = 6


def compute(client: Client) -> None:
    """Do what the page is to show: a rechunk, a transpose by messages, and two as they come."""
    x = client.persist(da.random.random((6000, 6000), chunks=(1000, -1)))
    wait(x)
    wait(client.persist(dask_p2p.rechunk(x, (-1, 1000))))
    with dask.config.set({"p2p.transports.order": ["comm"]}):
        wait(client.persist(dask_p2p.transpose(x)))
    for i in range(2):
        wait(client.persist(dask_p2p.transpose(x + i)))


def main() -> None:
    """Take the page once light, once dark."""
    IMAGES.mkdir(exist_ok=True)
    with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
        tempfile.TemporaryDirectory() as profile,
        chromium(profile, SIZE) as driver,
    ):
        dask_p2p.register(client)
        compute(client)
        page = client.dashboard_link.rpartition("/")[0] + "/p2p"
        for theme, name in (("light", "p2p-page.png"), ("dark", "p2p-page-dark.png")):
            visit(driver, f"{page}?theme={theme}")
            until(
                driver, "return Bokeh.documents[0].get_model_by_name('p2p-runs').data.name.length"
            )
            time.sleep(1)  # until all of it is drawn
            driver.save_screenshot(str(IMAGES / name))


if __name__ == "__main__":
    main()
