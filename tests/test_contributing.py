"""CONTRIBUTING.md is true: what it shows runs, and does what it says."""

import re
import sys

import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p import backends
from tests.docs.pages import PROJECT, ROOT
from tests.support import indexed, output_of

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Import an example, as a module of the file that it names."""
    for name, text in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: __import__(name)
    for name in EXAMPLES:
        sys.modules.pop(name, None)


def test_all_examples_are_tested():
    assert set(EXAMPLES) == {"roll", "deflate", "test_deflate", "tagged"}
    assert TEXT.count("```python") == len(EXAMPLES)


@pytest.mark.parametrize("shift", [0, 1, 3, -4, 25])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_operation(example, shift, axis):
    x = indexed((7, 9))
    for chunks in ((3, 4), (7, 2), (1, 9)):
        y = example("roll").roll(da.from_array(x, chunks=chunks), shift, axis)
        np.testing.assert_array_equal(y.compute(scheduler="sync"), np.roll(x, shift, axis))


@pytest.mark.programs
def test_the_transport(example, tmp_path):
    """In a process of its own: pytest imports what it runs, and would keep it."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import loop\n")
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_deflate.py"]
    output = output_of(*arguments, cwd=tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert int(re.search(r"(\d+) passed", output)[1]) > 20


def test_the_backend(example, monkeypatch):
    module = example("tagged")
    monkeypatch.setitem(backends.BACKENDS, "tagged", module.TaggedBackend())
    x = indexed((6, 8))
    blocks = da.from_array(x, chunks=(2, 8)).map_blocks(
        lambda block: block.view(module.Array), meta=np.empty((0, 0), x.dtype).view(module.Array)
    )
    y = dask_p2p.transpose(blocks)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), x.T)
    (block, *_), *_ = y.to_delayed()
    assert type(block.compute(scheduler="sync")) is module.Array
    with pytest.raises(dask_p2p.UnsupportedArrayError, match=r"expected a tagged\.Array"):
        backends.backend_named("tagged").check(x)


def test_commands_and_paths_are_there():
    for path in re.findall(r"`((?:dask_p2p|tests|deploy|docs|\.ci)/[\w./-]+)`", TEXT):
        assert (ROOT / path).exists(), path
    for extras in re.findall(r"'\.\[([\w,]+)\]'", TEXT):
        assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
