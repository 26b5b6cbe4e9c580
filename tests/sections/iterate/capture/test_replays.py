"""Steps that are captured by default, and those that cannot be: values, on all ranks."""

import os
import threading

import numpy as np
import pytest

from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.iterate import capture
from dask_p2p.sections.iterate.capture import Overlap, Replays
from tests.sections.emulated import kernel
from tests.sections.gpu.stars import X, check, compute
from tests.sections.iterate.test_programs import reference, star
from tests.support import noted, tune

STEPS = 19


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Steps of emulated kernels, whose Python code is not plain, may be captured."""
    monkeypatch.setattr(capture, "is_replayable", lambda function: True)
    # The emulated ranks have one GPU.
    monkeypatch.setattr(Replays, "_share_gpus", lambda replays: False)
    tune(monkeypatch, capture_steps=10)


#: By name: tuning, options of `iterate`, and attributes that are patched.
OTHER_STEPS = {
    "few steps": ({"capture_steps": STEPS}, {}, ()),
    "unknown code": ({}, {}, (capture, "is_replayable", lambda function: False)),
    "a list": ({}, {"unused": [1]}, ()),
    "overlap": ({}, {"overlap": True}, ()),
    "large": ({"captured_bytes": 300}, {"overlap": False}, ()),
    "one GPU": ({}, {}, (Replays, "_share_gpus", Replays._share_gpus)),
    "always asked": ({}, {"until": bool}, ()),
    "refused": ({}, {"capture": False}, ()),
    "one connection": ({}, {}, (os, "environ", {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})),
}


@pytest.mark.parametrize("how", OTHER_STEPS)
def test_other_steps_are_not(gpu, replayed, monkeypatch, how):
    numbers, options, patched = OTHER_STEPS[how]
    tune(monkeypatch, **numbers)
    if patched:
        monkeypatch.setattr(*patched)
    apply = kernel(gpu, star)

    def step(u, out, unused=None):
        apply(u, out=out)
        return 0.0 if how == "always asked" else None

    check(gpu, STEPS, function=step, **options)
    assert not replayed


@pytest.mark.parametrize("how", ["plain", "small", "refused", "unknown code", "few steps"])
def test_interiors_of_plain_functions_are_computed_during_exchanges(
    gpu, replayed, monkeypatch, how
):
    """Other exchanges are enqueued before the function."""
    monkeypatch.setattr(capture, "is_replayable", lambda function: how != "unknown code")
    tune(monkeypatch, graph_overlap_bytes=2**20 if how == "small" else 1)
    forks = noted(monkeypatch, Gpu, "on_side_stream", lambda device: 1)
    comparisons = noted(monkeypatch, Overlap, "check", lambda *arguments: 1)
    if how == "few steps":
        tune(monkeypatch, capture_steps=STEPS)
    options = {"overlap": False} if how == "refused" else {}
    if how == "unknown code":
        options["capture"] = True
    check(gpu, STEPS, **options)
    assert len(replayed) == (0 if how == "few steps" else 32)
    assert len(comparisons) == 4 * (how == "plain")  # once on each rank
    assert len(forks) == 8 * (how == "plain")


def reads_the_host(gpu, is_meant):
    apply = kernel(gpu, star)

    def step(u, out):
        if is_meant(out):
            u.get()
        apply(u, out=out)

    return step


def nth_of_a_cycle(number):
    """Return a condition of a rank's calls: the one of this number in a capture."""
    calls = threading.local()

    def is_meant(gpu):
        calls.count = getattr(calls, "count", 0) + 1 if gpu.capture is not None else 0
        return calls.count == number

    return is_meant


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("on", ["all ranks", "one rank"])
def test_steps_that_read_the_host_go_on_one_by_one(gpu, replayed, on, number):
    is_meant = nth_of_a_cycle(number)

    def condition(out):
        return is_meant(gpu) and (on == "all ranks" or out.shape == (3, 6))

    check(gpu, STEPS, function=reads_the_host(gpu, condition))
    assert not replayed


@pytest.mark.parametrize("on", ["all ranks", "one rank"])
def test_graphs_with_other_results_are_dropped(gpu, replayed, on):
    apply = kernel(gpu, star)

    def step(u, out):
        apply(u, out=out)
        if gpu.capture is not None and (on == "all ranks" or out.shape == (3, 6)):
            out[...] = 7.0

    check(gpu, STEPS, function=step)
    assert len(replayed) == 4, "each graph was tried once"


@pytest.mark.parametrize("capture", ["auto", True])
def test_functions_of_a_boundary_are_called_in_each_step(gpu, replayed, capture):
    def rim(rim, inside, at):
        rim[...] = 0.5

    (expected,) = reference(star, [X], 1, STEPS, 0.5)
    assert np.array_equal(compute(gpu, STEPS, boundary=rim, capture=capture), expected)
    assert bool(replayed) == (capture is True)
