"""Processes that lack an optional package: each error or message names the extra."""

from __future__ import annotations

import pytest

from dask_p2p.errors import MissingPackageError, install_command, needs
from tests.support import import_path, ran

# Python imports it at each start, also in workers.
WITHOUT = """
import os
from importlib.machinery import PathFinder

found = PathFinder.find_spec
missing = os.environ["MISSING_PACKAGES"].split(",")

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in missing else found(name, path, target)

PathFinder.find_spec = find_spec
"""

# Missing packages, extra, program that says so.
PROGRAMS = {
    "xarray": ("xarray", "xarray", "import dask_p2p.xarray"),
    "zarr, to_zarr": (
        "zarr",
        "zarr",
        "import xarray as xr, dask_p2p.xarray\n"
        "xr.DataArray([1.0], dims='x', name='a').p2p.to_zarr('a.zarr')",
    ),
    "zarr, command": (
        "zarr",
        "zarr",
        "from dask_p2p.cli import p2p; p2p(['transpose', '.', 'out.zarr'])",
    ),
    "bokeh": (
        "bokeh",
        "dashboard",
        "from dask_p2p.cli import p2p; p2p(['demo', '--cpu', '--size', '64', '--workers', '1'])",
    ),
    "bokeh, page": (
        "bokeh",
        "dashboard",
        "from urllib.request import urlopen\n"
        "from distributed import Client\n"
        "import dask_p2p\n"
        "with dask_p2p.local_cluster(1, gpus=False, processes=False) as made, Client(made) as c:\n"
        "    dask_p2p.register(c)\n"
        "    with urlopen(c.dashboard_link.replace('status', 'p2p')) as page:\n"
        "        print(page.read().decode())",
    ),
    "prometheus_client": (
        "prometheus_client",
        "metrics",
        "import logging\n"
        "from distributed import Client\n"
        "import dask_p2p\n"
        "with Client(processes=False, silence_logs=logging.INFO) as c: dask_p2p.register(c)",
    ),
    "cupy": ("cupy", "cuda13", "import dask_p2p; dask_p2p.local_cluster(gpus=True)"),
    "cupy, map_on_gpu": (
        "cupy",
        "cuda13",
        "import dask.array as da, dask_p2p\n"
        "dask_p2p.map_on_gpu(abs, da.ones(4), dtype=float).compute()",
    ),
    "dask_cuda": ("dask_cuda", "cuda13", "import dask_p2p; dask_p2p.local_cluster(gpus=True)"),
    "distributed_ucxx": (
        "distributed_ucxx",
        "cuda13",
        "import dask_p2p; dask_p2p.local_cluster(1, gpus=False, protocol='ucx')",
    ),
    "ucxx": (
        "ucxx",
        "ucx",
        "from dask_p2p.transports.ucx_messenger import ucxx_obstacle\n"
        "print(ucxx_obstacle().full_text)",
    ),
    "rich": ("rich", "bench", "import runpy; runpy.run_module('benchmarks', run_name='__main__')"),
}


def output_without(missing, folder, program):
    (folder / "sitecustomize.py").write_text(WITHOUT)
    (folder / "program.py").write_text(f"if __name__ == '__main__':\n    {indented(program)}\n")
    variables = {"PYTHONPATH": f"{folder}:{import_path()}", "MISSING_PACKAGES": missing}
    process = ran(folder / "program.py", cwd=folder, **variables)
    return process.stdout + process.stderr


def indented(program):
    return program.replace("\n", "\n    ")


@pytest.mark.programs
@pytest.mark.parametrize("case", PROGRAMS)
def test_a_missing_package(tmp_path, case):
    missing, extra, program = PROGRAMS[case]
    assert install_command(extra) in output_without(missing, tmp_path, program)


@pytest.mark.programs
def test_the_package_without_any_extra(tmp_path):
    """The others work without them."""
    names = {name for name, _, _ in PROGRAMS.values()}
    program = (
        "import dask.array as da, dask_p2p\n"
        "x = da.arange(12, chunks=3).reshape(4, 3)\n"
        "print(dask_p2p.transpose(x).compute().tolist())"
    )
    output = output_without(",".join(sorted(names)), tmp_path, program)
    assert output == "[[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]\n"


def test_errors_of_packages_that_are_there():
    with pytest.raises(ModuleNotFoundError, match="other") as caught, needs("zarr", "zarr"):
        raise ModuleNotFoundError("No module named 'other'", name="other")
    assert not isinstance(caught.value, MissingPackageError)
    with pytest.raises(MissingPackageError, match="package zarr") as caught, needs("zarr", "zarr"):
        raise ModuleNotFoundError("No module named 'zarr.core'", name="zarr.core")
    assert caught.value.name == "zarr"
