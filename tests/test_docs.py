"""The documentation is true: its examples run, and the names in it are there."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import dask_p2p

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(dask_p2p.__path__, prefix="dask_p2p.")
)
GPU_LIBRARIES = {"cuda", "cupy", "cupy_backends", "dask_cuda", "pynvml", "rmm", "ucxx"}


@pytest.mark.parametrize("name", ["dask_p2p", *MODULES])
def test_examples_in_docstrings(name):
    try:
        module = import_module(name)
    except ImportError as exc:
        if (exc.name or "").partition(".")[0] not in GPU_LIBRARIES:
            raise
        pytest.skip(f"needs {exc.name}")
    assert doctest.testmod(module).failed == 0
