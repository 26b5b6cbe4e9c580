from __future__ import annotations

import gc
import importlib.util
import sys

import pytest

from dask_p2p.loading import call_when_imported, is_library, load_module
from tests.support import output_of


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Give a function that makes a module of a text, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(text):
        (tmp_path / "made_for_loading.py").write_text(text)
        return "made_for_loading"

    yield write_module
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


def test_a_threshold_that_an_import_sets_stays(module, collections):
    load_module(module("import gc\ngc.set_threshold(5000)"))
    assert gc.get_threshold()[0] == 5000


def test_collections_go_on_after_an_import_that_fails(module, collections):
    with pytest.raises(ZeroDivisionError):
        load_module(module("1 / 0"))
    assert gc.get_threshold() == (700, 10, 10)


SLICED = """
import gc
import dask_p2p
dask_p2p.transpose
import dask.array as da
da.ones((4, 4), chunks=2)[1:, 2]
print(gc.isenabled(), gc.get_threshold()[0] > 0)
"""


@pytest.mark.slow
def test_collections_are_on_after_the_import_of_dask():
    """Dask turns them off in slices, and then on if they were on at its import."""
    assert output_of("-c", SLICED) == "True True\n"


@pytest.fixture
def _finders():
    """There are no more finders after a test than before."""
    before = [*sys.meta_path]
    yield
    assert sys.meta_path == before


of_later_imports = pytest.mark.usefixtures("_finders")


def test_an_action_on_a_module_that_is_imported_already():
    modules = []
    call_when_imported("sys", modules.append)()
    assert modules == [sys]


@of_later_imports
def test_an_action_on_a_module_that_does_not_exist():
    forget = call_when_imported("missing_in_a_test", lambda module: pytest.fail("called"))
    with pytest.raises(ModuleNotFoundError, match="missing_in_a_test"):
        importlib.import_module("missing_in_a_test")
    forget()


@of_later_imports
def test_an_action_on_a_module_whose_first_import_fails(module):
    name, modules = module("import sys\nif not hasattr(sys, 'may_load'): 1 / 0"), []
    call_when_imported(name, modules.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(name)
    assert not modules
    sys.may_load = True
    try:
        assert modules == [importlib.import_module(name)]
    finally:
        del sys.may_load


@pytest.mark.parametrize("folder", ["data", "package-1.0.dist-info"])  # as by `pip --target`
def test_libraries_lie_beside_metadata(module, tmp_path, folder):
    (tmp_path / folder).mkdir()
    importlib.import_module(name := module(""))
    assert is_library(name) == (folder != "data")
