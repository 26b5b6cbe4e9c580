"""Transforms by kept plans: values on a GPU, and by a stand-in for CuPy which plans there are."""

import sys
import threading
from itertools import count, product
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import scipy.fft

from dask_p2p.backends import cufft

STREAMS = count(1)  # which have plans of their own
NAMES = ["fftn", "ifftn", "rfftn", "irfftn"]


class Block(np.ndarray):
    data = SimpleNamespace(device_id=0)


def block(shape, dtype="c16"):
    return np.random.default_rng(0).normal(size=shape).astype(dtype).view(Block)


class Plan:
    def __init__(self, lengths, axes, values):
        self.lengths, self.axes, self.values = lengths, axes, values

    def get_output_array(self, a):
        shape = [*a.shape]
        if self.values != "C2C":
            length = self.lengths[-1]
            shape[-1] = length // 2 + 1 if self.values == "R2C" else length
        dtype = a.dtype if self.values == "C2C" else {"R2C": "c16", "C2R": "f8"}[self.values]
        return np.empty(shape, dtype)

    def fft(self, a, out, direction):
        name = {"C2C": {-1: "fftn", 1: "ifftn"}[direction], "R2C": "rfftn", "C2R": "irfftn"}
        norm = "backward" if direction < 0 else "forward"
        out[...] = getattr(scipy.fft, name[self.values])(a, self.lengths, self.axes, norm=norm)
        if self.values == "C2R":
            a[...] = np.nan


def plan_along_first(lengths, embed, stride, distance, *options):
    """Return a plan like that of cuFFT's advanced layout: columns with this stride."""
    assert options[:3] == (embed, stride, distance) == (lengths, stride, 1)
    kind, columns, *_ = options[3:]
    plan = Plan(lengths, (0,), "C2C")

    def fft(a, out, direction):
        assert kind == a.dtype.char
        layout = (*lengths, columns), (stride * a.itemsize, a.itemsize)
        source, target = (np.lib.stride_tricks.as_strided(array, *layout) for array in (a, out))
        Plan.fft(plan, source, target, direction)

    plan.fft = fft
    return plan


@pytest.fixture
def cupy(monkeypatch):
    """What was planned, and what was left to CuPy."""
    fake = SimpleNamespace(planned=[], delegated=[], stream=SimpleNamespace(ptr=next(STREAMS)))
    library = ModuleType("cupyx.scipy.fft")

    def get_fft_plan(a, lengths, axes, values):
        if len(axes) > 3:
            raise ValueError("Only up to three axes is supported")
        fake.planned.append((lengths, axes, values))
        return Plan(lengths, axes, values)

    def leaves(name):
        def run(*args, **kwargs):
            fake.delegated.append(name)
            return getattr(scipy.fft, name)(*args, **kwargs)

        return run

    library.get_fft_plan = get_fft_plan
    for name in [*NAMES, "hfft"]:
        setattr(library, name, leaves(name))
    package, scipys = ModuleType("cupy"), ModuleType("cupyx.scipy")
    package.cuda = cuda = ModuleType("cupy.cuda")
    cuda.get_current_stream = lambda: fake.stream
    cuda.cufft = SimpleNamespace(CUFFT_C2C="F", CUFFT_Z2Z="D", PlanNd=plan_along_first)
    scipys.fft = library
    for module in (package, cuda, ModuleType("cupyx"), scipys, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake


def arguments(name, x, axes):
    """Return what a function makes this of without scaling."""
    lengths = [x.shape[axis] for axis in axes]
    if name == "irfftn":
        lengths[-1] = 2 * lengths[-1] - 1
    return tuple(lengths), "forward" if name.startswith("i") else "backward"


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("axes", [(2,), (1, 2), (2, 1), (0, 1, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_plans_are_made_once(cupy, name, axes, overwrites):
    x = block((3, 4, 5), "f8" if name == "rfftn" else "c16")
    if name not in ("fftn", "ifftn") and axes == (2, 1):
        axes = (1, 2)
    lengths, norm = arguments(name, x, axes)
    expected = getattr(scipy.fft, name)(np.asarray(x), lengths, axes, norm=norm)
    for _ in range(2):
        a = x.copy()
        y = getattr(cufft, name)(a, lengths, axes, norm=norm, overwrite_x=overwrites)
        np.testing.assert_allclose(y, expected)
        assert (y is a) == (overwrites and name in ("fftn", "ifftn"))
        assert overwrites or np.array_equal(a, x)
    assert (len(cupy.planned), cupy.delegated) == (1, [])


@pytest.mark.parametrize(
    ("name", "x", "lengths", "axes", "norm"),
    [
        ("fftn", block((4, 6)), (4, 6), (0, 1), "ortho"),
        ("fftn", block((4, 6)), (4, 6), (0, 1), "forward"),
        ("ifftn", block((4, 6)), (4, 6), (0, 1), "backward"),
        ("fftn", block((4, 6)), (4, 5), (0, 1), "backward"),
        ("irfftn", block((4, 6)), (4, 6), (0, 1), "forward"),
        ("fftn", block((4, 6), "f8"), (4, 6), (0, 1), "backward"),
        ("fftn", block((4, 6), "i4"), (4, 6), (0, 1), "backward"),
        ("rfftn", block((4, 6), "i2"), (4, 6), (0, 1), "backward"),
        ("fftn", block((6, 4)), (6,), (0,), "backward"),
        ("fftn", block((4, 6)), (8,), (0,), "backward"),
        ("fftn", block((4, 6), "f8"), (4,), (0,), "backward"),
        ("fftn", block((4, 4, 4)), (4,), (1,), "backward"),
        ("fftn", block((4, 4, 4)), (4, 4), (0, 1), "backward"),
        ("rfftn", block((4, 6), "f8"), (6, 4), (1, 0), "backward"),
        ("fftn", block((2, 2, 2, 2)), (2, 2, 2, 2), (0, 1, 2, 3), "backward"),
    ],
)
def test_what_is_left_to_cupy(cupy, name, x, lengths, axes, norm):
    y = getattr(cufft, name)(x, lengths, axes, norm=norm)
    expected = getattr(scipy.fft, name)(np.asarray(x), lengths, axes, norm=norm)
    np.testing.assert_allclose(y, expected)
    assert (cupy.planned, cupy.delegated) == ([], [name])
    assert cufft.hfft(np.ones(3)).shape == (4,)


@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("name", ["fftn", "ifftn"])
def test_the_first_axis_is_transformed_where_the_array_is(cupy, name, dtype):
    x = block((8, 6, 5), dtype)
    norm = arguments(name, x, (0,))[1]
    expected = getattr(scipy.fft, name)(np.asarray(x), (8,), (0,), norm=norm)
    result = getattr(cufft, name)(x, (8,), (0,), norm=norm)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    before, part = x.copy(), x[:, 2:5]
    assert getattr(cufft, name)(part, (8,), (0,), norm=norm, overwrite_x=True) is part
    np.testing.assert_allclose(part, expected[:, 2:5], rtol=1e-5)
    np.testing.assert_array_equal(x[:, [0, 1, 5]], before[:, [0, 1, 5]])
    assert (cupy.planned, cupy.delegated) == ([], [])


def test_a_stream_a_gpu_and_a_thread_have_their_own(cupy, monkeypatch):
    """A plan has memory to work in, which two transforms at a time would both use."""
    x = block((4, 6))

    def run():
        cufft.fftn(x, (4, 6), (0, 1))

    run()
    cupy.stream = SimpleNamespace(ptr=next(STREAMS))
    run()
    monkeypatch.setattr(Block, "data", SimpleNamespace(device_id=1))
    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(cupy.planned) == 4
    run()
    assert len(cupy.planned) == 4


def test_few_plans_are_kept(cupy):
    """Those that were used last."""
    for length in range(2, 22):
        cufft.fftn(block((length,)), (length,), (0,))
        cufft.fftn(block((2,)), (2,), (0,))
    assert len(cupy.planned) == 20
    cufft.fftn(block((21,)), (21,), (0,))
    assert len(cupy.planned) == 20
    cufft.fftn(block((3,)), (3,), (0,))
    assert len(cupy.planned) == 21


@pytest.mark.gpu
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_values(dtype, overwrites):
    cupy = pytest.importorskip("cupy")
    names = ["rfftn"] if dtype[0] == "f" else ["fftn", "ifftn", "irfftn"]
    some_axes = [(2,), (1, 2), (0, 1, 2), *([] if dtype[0] == "f" else [(0,)])]
    for name, axes, shape in product(names, some_axes, [(4, 6, 8), (3, 5, 7), (256, 9, 4)]):
        x = np.random.default_rng(0).normal(size=shape).astype(dtype)
        lengths, norm = arguments(name, x, axes)
        expected = getattr(scipy.fft, name)(x, lengths, axes, norm=norm)
        for _ in range(2):
            a = cupy.asarray(x)
            result = getattr(cufft, name)(a, lengths, axes, norm=norm, overwrite_x=overwrites)
            atol = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(result.get(), expected, rtol=0, atol=atol)
            assert result.dtype == expected.dtype
            assert overwrites or np.array_equal(a.get(), x)
