from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from dask_p2p.loading import loaded
from tests.support import import_path

MANY = "parts = [[] for _ in range(100_000)]"

#: Loads the scheduler's request in a process that has none of the modules, and counts collections.
RECEIVED = """
import gc, sys
import dask_p2p, distributed, dask.array
from dask_p2p import versioned
from pickle import loads
counted = []
gc.callbacks.append(lambda phase, info: phase == "start" and counted.append(info))
add_to = loads(bytes.fromhex(sys.argv[1]))
assert add_to.__self__.name and "dask_p2p.transports.packed.comm" in sys.modules
print(len(counted))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Give a function that makes a module of a text, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(text):
        (tmp_path / "made_for_loading.py").write_text(text)
        return "made_for_loading"

    yield made
    sys.modules.pop("made_for_loading", None)


@pytest.fixture
def collections():
    counted = []

    def count(phase, info):
        counted.append(info)

    gc.callbacks.append(count)
    yield counted
    gc.callbacks.remove(count)


def test_an_import_collects_no_garbage(module, collections):
    name = module(f"{MANY}\nimport gc\nis_on = gc.isenabled()")
    assert gc.isenabled()
    made = loaded(name)
    assert len(made.parts) == 100_000
    assert not made.is_on
    assert gc.isenabled()
    _ = [[] for _ in range(1000)]
    assert collections, "and is collected afterwards"


def test_collections_that_are_off_stay_off(module):
    name = module("")
    gc.disable()
    try:
        loaded(name)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collections_go_on_after_an_import_that_fails(module):
    with pytest.raises(ZeroDivisionError):
        loaded(module("1 / 0"))
    assert gc.isenabled()


def test_a_worker_imports_the_plugin_without_collections():
    from distributed.protocol.pickle import dumps

    from dask_p2p.plugins.worker import P2PPlugin

    command = [sys.executable, "-c", RECEIVED, dumps(P2PPlugin().add_to).hex()]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert int(done.stdout) <= 2  # dozens otherwise
