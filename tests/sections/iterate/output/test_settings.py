"""A run that resumes with other functions or arguments than those of the first run."""

import dataclasses
import functools
import re
import sys
import types
import warnings

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Field, Whole, iterate
from tests.support import output_of

pytest.importorskip("zarr")

CLUSTER = {"n_workers": 2, "threads_per_worker": 2}
U = np.random.default_rng(0).normal(size=(12, 8))
RATE = 0.25
NUMBERS = {"rate": 0.5, "steps": 10}


def helper(u):
    return RATE * (u[2:] - 2 * u[1:-1] + u[:-2])


def heat(u):
    """Return the next field."""
    return {"u": u[1:-1] + helper(u) * NUMBERS["rate"]}


def ready(u):
    return {"u": u}


def differences(path, steps=5, function=heat, chunks=6, scheduler="sync", **options):
    """Run some steps; return the names in the warnings."""
    options = {
        "fields": {"u": da.from_array(U, chunks=(chunks, 8))},
        "depth": {0: 1},
        "boundary": "nearest",
        "checkpoint": Checkpoint(path, every=5),
        "ranks": 1,
        **options,
    }
    fields = options.pop("fields")
    with warnings.catch_warnings(record=True, action="always") as caught:
        dask.compute(iterate(function, fields, steps=steps, **options), scheduler=scheduler)
    texts = [str(warning.message) for warning in caught]
    return [re.search(r"first run there in (.*): the steps before", text)[1] for text in texts]


def test_boundaries_depths_and_initial_values(tmp_path):
    assert differences(tmp_path) == []
    for boundary in ("periodic", 1.5, {0: ("nearest", 0.0)}, lambda rim, inside, at: None):
        assert differences(tmp_path, 9, boundary=boundary) == ["the boundary of u"]
    wide = {"depth": {0: 2}, "function": lambda u: heat(u[1:-1])}
    assert differences(tmp_path, 9, **wide) == ["the functions, the depth of u"]
    other_values = {"u": da.from_array(U + 1, chunks=(6, 8))}
    assert differences(tmp_path, 9, fields=other_values) == ["u"]


def test_functions_of_the_same_name(tmp_path):
    def scaled(rate):
        def step(u):
            """Return a field."""
            return {"u": rate * u[1:-1]}

        return step

    assert differences(tmp_path / "closure", function=scaled(1.0)) == []
    assert differences(tmp_path / "closure", 9, scaled(1.0)) == []
    assert differences(tmp_path / "closure", 9, scaled(2.0)) == ["the functions"]

    def step(u):
        """Return a field."""
        return {"u": repeated(u, 2)}

    def repeated(u, count):
        return repeated(u, count - 1) if count else 1.0 * u[1:-1]

    path, copied = tmp_path / "code", cloudpickle.loads(cloudpickle.dumps(step))
    assert differences(path, function=step) == []
    assert differences(path, 9, copied) == []

    def step(u):
        """Return the same field, with another text."""

        # and other lines
        return {"u": repeated(u, 2)}

    assert differences(path, 9, step) == []

    def step(u):
        return {"u": 1.5 * u[1:-1]}

    assert differences(path, 9, step) == ["the functions"]
    phases = [(heat, ("u",)), (ready, ("u",))]
    assert differences(tmp_path / "phases", function=phases, fields={"u": da.from_array(U)}) == []
    again = {"fields": {"u": da.from_array(U)}}
    assert differences(tmp_path / "phases", 9, phases[::-1], **again) == ["the functions"]


def test_variables_of_the_module(tmp_path, monkeypatch):
    assert differences(tmp_path) == []
    monkeypatch.setitem(NUMBERS, "steps", 9)
    assert differences(tmp_path, 9) == [], "no function reads it"
    monkeypatch.setitem(NUMBERS, "rate", 0.25)
    assert differences(tmp_path, 9) == ["the functions"]
    monkeypatch.setitem(NUMBERS, "rate", 0.5)
    monkeypatch.setattr(sys.modules[__name__], "RATE", 0.125)
    assert differences(tmp_path, 9) == ["the functions"]
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda u: 0)
    assert differences(tmp_path, 9) == ["the functions"]


@dataclasses.dataclass
class Numbers:
    rate: float = 1.0
    steps: int = 5

    def double(self):
        return 2 * self.rate


PAIRS = [
    (1, 2),
    ("a", "b"),
    (None, 1),
    ([1, 2], [1, 3]),
    ({"a": 1}, {"a": 2}),
    ({"x", "y", "z"}, {"x", "y"}),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    (Numbers(1.0), Numbers(2.0)),
    (Numbers(1.0).double, Numbers(2.0).double),
    (np.arange(3), np.arange(3) + 1),
    (np.float32(1), np.float64(1)),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (lambda x: x + 1, lambda x: x + 2),
    (slice(1), slice(2)),
    (np.array([1, "a"], object), np.array([1, "b"], object)),
]


@pytest.mark.parametrize(("value", "changed"), PAIRS)
def test_keywords(tmp_path, value, changed):
    def keyword(u, p):
        return {"u": u[1:-1]}

    assert differences(tmp_path, function=keyword, p=value) == []
    copied = cloudpickle.loads(cloudpickle.dumps(value))
    assert differences(tmp_path, 9, keyword, p=copied) == []
    assert differences(tmp_path, 9, keyword, p=changed) == ["p"]


def test_constants(client, tmp_path):
    """Arrays of all kinds, divided and whole, by any number of ranks."""

    def step(u, a, row, column, wide, whole, lazy, rate):
        return {"u": u[1:-1] + 0 * (a + row + column)}

    def values(shift):
        return {
            "a": da.from_array(U + shift, chunks=4),
            "row": np.arange(8.0) + shift,
            "column": U[:, :1] + shift,
            "wide": Field(U + shift, depth={0: 1}, boundary="nearest"),
            "whole": Whole(np.arange(5.0) + shift),
            "lazy": Whole(da.arange(6.0, chunks=2) + shift),
            "rate": 0.5 + shift,
        }

    constants = values(0)
    options = {"function": step, "scheduler": None}
    assert differences(tmp_path, constants=constants, **options, ranks=1) == []
    for ranks, chunks in ((2, 6), (4, 3), (3, 4)):
        layout = {"ranks": ranks, "chunks": chunks}
        assert differences(tmp_path, 9, **options, constants=constants, **layout) == []
    for name, value in values(1).items():
        other = {"constants": constants | {name: value}, "ranks": 2}
        assert differences(tmp_path, 9, **options, **other) == [name]


PROGRAM = """
import sys, warnings
import dask, dask.array as da, numpy as np
from dask_p2p import Checkpoint, iterate

KINDS = {"x", "y", "zz"}
OPTIONS = {"rate": 0.5, "names": {"a", "b", "c"}}

class Model:
    def __init__(self):
        self.rate = 0.25
        self.names = {"p", "q", "r"}
    def __call__(self, u):
        return {"u": u[1:-1] + self.rate * len(self.names & KINDS) * OPTIONS["rate"]}

def step(u, options, key):
    if key in {"one", "two", "three"}:
        return Model()(u)
    return {"u": u[1:-1] * np.float32(options["rate"])}

if __name__ == "__main__":
    path, steps, chunks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("error")
    for name, function in (("step", step), ("model", Model())):
        more = {"options": OPTIONS, "key": "one"} if name == "step" else {}
        u = da.from_array(np.arange(24.0), chunks=chunks)
        made = iterate(function, {"u": u}, 1, steps, ranks=1,
                       checkpoint=Checkpoint(path + "/" + name, every=2), **more)
        dask.compute(made, scheduler="sync")
"""


@pytest.mark.slow
def test_the_same_program_in_another_process_has_no_warning(tmp_path):
    """With another hash seed, another file, other lines and other chunks."""
    for number, steps in enumerate((2, 4, 6)):
        file = tmp_path / f"program-{number}.py"
        file.write_text("# a line\n" * number + PROGRAM)
        output_of(file, tmp_path / "states", steps, 4 + number, PYTHONHASHSEED=str(number))
