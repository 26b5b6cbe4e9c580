from __future__ import annotations

import sys

import pytest

from dask_p2p.tools.late_import import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that is not imported yet."""
    name = "imported_late_by_a_test"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield name
    sys.modules.pop(name, None)
    assert sys.meta_path == finders


def test_a_module_that_is_imported_later(module):
    seen = []
    when_imported(module, lambda found: seen.append(found.value))
    assert not seen
    found = __import__(module)
    assert seen == [1]
    assert type(found.__loader__).__module__ != when_imported.__module__
    assert found.__spec__.loader is found.__loader__


def test_a_module_that_is_imported_already():
    seen = []
    forget = when_imported("sys", seen.append)
    assert seen == [sys]
    forget()


def test_an_action_that_is_forgotten(module):
    seen = []
    forget = when_imported(module, seen.append)
    forget()
    forget()
    __import__(module)
    assert not seen


def test_a_module_that_does_not_exist(module):
    seen = []
    when_imported("missing_in_a_test", seen.append)
    with pytest.raises(ModuleNotFoundError, match="missing_in_a_test"):
        __import__("missing_in_a_test")
    assert not seen
