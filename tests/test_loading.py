from __future__ import annotations

import gc
import importlib.util
import sys

import pytest
from distributed.protocol.pickle import dumps

from dask_p2p.loading import loaded, when_imported
from tests.support import output_of

MANY = """
import gc
def collections():
    return sum(each["collections"] for each in gc.get_stats())
before = collections()
parts = [[] for _ in range(100_000)]
made, is_on = collections() - before, gc.isenabled()
"""

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
    """Count the collections, which are on with Python's thresholds."""
    counted, was_on, thresholds = [], gc.isenabled(), gc.get_threshold()

    def count(phase, info):
        counted.append(info)

    gc.callbacks.append(count)
    gc.enable()
    gc.set_threshold(700, 10, 10)
    yield counted
    gc.callbacks.remove(count)
    gc.set_threshold(*thresholds)
    if not was_on:
        gc.disable()


def test_an_import_collects_no_garbage(module, collections):
    made = loaded(module(MANY))
    assert made.made == 0
    assert made.is_on, "Dask keeps what it reads at its import"
    assert gc.get_threshold() == (700, 10, 10)
    collections.clear()
    _ = [[] for _ in range(1000)]
    assert collections, "they go on"


def test_an_import_within_an_import(module, collections):
    loaded(module("import gc\nfrom dask_p2p.loading import loaded, when_imported\nloaded('json')"))
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("threshold", [0, 5000])
def test_thresholds_of_others_stay(module, collections, threshold):
    gc.set_threshold(threshold)
    loaded(module(""))
    assert gc.get_threshold()[0] == threshold


def test_a_threshold_that_an_import_sets_stays(module, collections):
    loaded(module("import gc\ngc.set_threshold(5000)"))
    assert gc.get_threshold()[0] == 5000


def test_collections_go_on_after_an_import_that_fails(module, collections):
    with pytest.raises(ZeroDivisionError):
        loaded(module("1 / 0"))
    assert gc.get_threshold() == (700, 10, 10)


SLICED = """
import gc
import dask_p2p
dask_p2p.transpose
import dask.array as da
da.ones((4, 4), chunks=2)[1:, 2]
print(gc.isenabled(), gc.get_threshold()[0] > 0)
"""


def test_collections_are_on_after_the_import_of_dask():
    """Dask turns them off in slices, and then on if they were on at its import."""
    assert output_of("-c", SLICED) == "True True\n"


def test_a_worker_imports_the_plugin_without_collections():
    from dask_p2p.plugins.worker import P2PPlugin

    output = output_of("-c", RECEIVED, dumps(P2PPlugin().add_to).hex())
    assert int(output) <= 2  # dozens otherwise


@pytest.fixture
def _finders():
    """There are no more finders after a test than before."""
    before = [*sys.meta_path]
    yield
    assert sys.meta_path == before


of_later_imports = pytest.mark.usefixtures("_finders")


@of_later_imports
def test_an_action_on_a_module_that_is_imported_later(module):
    name, seen = module("value = 3"), []
    when_imported(name, lambda found: seen.append(found.value))
    import json  # noqa: F401  # another one

    assert not seen
    found = importlib.import_module(name)
    assert seen == [3]
    assert found.__spec__.loader is found.__loader__
    importlib.reload(found)
    assert seen == [3], "no more"


def test_an_action_on_a_module_that_is_imported_already():
    seen = []
    forget = when_imported("sys", seen.append)
    assert seen == [sys]
    forget()


@of_later_imports
def test_an_action_that_is_forgotten(module):
    name, seen = module(""), []
    forget = when_imported(name, seen.append)
    forget()
    forget()
    importlib.import_module(name)
    assert not seen


@of_later_imports
def test_actions_of_a_program_that_first_looks_for_the_module(module):
    name, seen = module(""), []
    for number in range(2):
        when_imported(name, lambda found, number=number: seen.append(number))
    assert importlib.util.find_spec(name) is not None
    assert not seen
    importlib.import_module(name)
    assert sorted(seen) == [0, 1]


@of_later_imports
def test_an_action_on_a_module_that_does_not_exist():
    forget = when_imported("missing_in_a_test", lambda found: pytest.fail("called"))
    with pytest.raises(ModuleNotFoundError, match="missing_in_a_test"):
        importlib.import_module("missing_in_a_test")
    forget()


@of_later_imports
def test_an_action_on_a_module_whose_first_import_fails(module):
    name, seen = module("import sys\nif not hasattr(sys, 'may_load'): 1 / 0"), []
    when_imported(name, seen.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(name)
    assert not seen
    sys.may_load = True
    try:
        assert seen == [importlib.import_module(name)]
    finally:
        del sys.may_load
