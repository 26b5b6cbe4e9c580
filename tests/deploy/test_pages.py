"""Properties of all folders of deploy/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dask.utils import parse_bytes

from dask_p2p.tools.cluster import POOL_GRANULE_BYTES
from tests.deploy.support import DEPLOY

WAYS = sorted(path.name for path in DEPLOY.iterdir() if path.is_dir())
HEADINGS = ["Requirements", "Commands", "Expected output", "Troubleshooting", "Tested setups"]
OPTIONS = (Path(__file__).parent / "schemas" / "dask-cuda-worker.txt").read_text().split()
TEXTS = {
    path: path.read_text()
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.suffix not in {".lock", ".json", ".svg", ".png", ".pyc"}
}


@pytest.mark.parametrize("way", ["docker", "kubernetes", "local", "slurm", "ssh"])
def test_each_way_has_a_page(way):
    page = TEXTS[DEPLOY / way / "README.md"]
    assert re.findall(r"^## (.*)$", page, flags=re.MULTILINE) == HEADINGS
    for path in (DEPLOY / way).iterdir():
        if path.name not in {"README.md", "__pycache__"}:
            assert f"`{path.name}`" in page, f"the page does not say what {path.name} is"


def test_the_first_page_names_all_ways():
    page = TEXTS[DEPLOY / "README.md"]
    assert {way for way in WAYS if f"[`{way}/`]({way}" in page} == set(WAYS)


def commands_of_cuda_workers():
    """Their options, wherever they are written."""
    for path, text in TEXTS.items():
        joined = re.sub(r"\\\n\s*|\n\s*- ", " ", text)
        for line in re.findall(r"dask cuda worker(.*)|worker_extra_args=(.*)", joined):
            yield path, re.findall(r"--[a-z][a-z-]+", "".join(line))


def test_options_of_dask_cuda_are_those_that_it_has():
    commands = list(commands_of_cuda_workers())
    assert len({path.parent for path, options in commands if options}) >= 4
    for path, options in commands:
        assert set(options) <= set(OPTIONS), path


def test_pools_are_quick_to_map():
    sizes = {
        size
        for text in TEXTS.values()
        for size in re.findall(
            r"(?i)pool[_-]?size[^\d\n]{0,20}\n?[^\d\n]{0,12}(\d+ ?[KMGT]i?B)", text
        )
        + re.findall(r"POOL\W{1,3}(\d+ ?[KMGT]i?B)", text)
    }
    assert sizes
    assert all(parse_bytes(size) % POOL_GRANULE_BYTES == 0 for size in sizes)
