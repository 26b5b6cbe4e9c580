"""The deployment files do what they say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DEPLOY = os.path.join(os.path.dirname(os.path.dirname(__file__)), "deploy")

PROGRAM = """
import dask.array as da, numpy as np
from distributed import Client, LocalCluster
import dask_p2p

if __name__ == "__main__":
    y = dask_p2p.transpose(da.ones((8, 6), chunks=(2, 6)))
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            print(set(client.run(lambda dask_worker: "dask-p2p" in dask_worker.plugins).values()))
            assert client.compute(y).result().shape == (6, 8)
"""


@pytest.mark.cluster
def test_the_configuration_puts_the_plugin_on_all_workers(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = os.path.dirname(DEPLOY)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}

    def run(**variables):
        done = subprocess.run(
            [sys.executable, str(program)],
            env={**env, **variables},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run(DASK_CONFIG=DEPLOY) == "{True}"
    assert run() == "{False}"
