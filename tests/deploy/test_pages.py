"""Properties of all folders of deploy/."""

from __future__ import annotations

import re
from pathlib import Path

from dask.utils import parse_bytes

from dask_p2p.tools.cluster import POOL_GRANULE_BYTES
from tests.deploy.support import DEPLOY

OPTIONS = (Path(__file__).parent / "schemas" / "dask-cuda-worker.txt").read_text().split()
TEXTS = {
    path: path.read_text()
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.suffix not in {".lock", ".json", ".svg", ".png", ".pyc"}
}


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
