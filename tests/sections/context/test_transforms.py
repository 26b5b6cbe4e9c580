from collections import Counter
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p.backends.cufft import is_quick_along_first
from dask_p2p.errors import InputError, SectionError, UnsupportedArrayError
from dask_p2p.geometry import box_slices
from dask_p2p.ops.fft import local as local_fft
from dask_p2p.ops.fft.stages import order_in_memory
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections import Context
from dask_p2p.sections.context import transforms
from dask_p2p.sections.wire.connections import Connections
from tests.sections.emulated import emulated_gpu, run_on_gpus
from tests.sections.gangs import run_gang
from tests.sections.gpu.test_regions import filled, overwritten
from tests.support import noted, tune


@st.composite
def cases(draw):
    sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple).filter(sum)
    chunks = draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    ndim = len(chunks)
    ranks = RankGrid.at_most(chunks, draw(st.integers(1, 4)))
    partition = st.none() | st.lists(st.integers(0, ndim - 1), min_size=1, max_size=2)
    axes = st.lists(st.integers(-ndim, ndim - 1), min_size=1, unique_by=lambda a: a % ndim)
    return ranks, draw(axes | st.none()), draw(partition), draw(partition)


def always_last(*args):
    """As on GPUs: axes that are transformed lie last in memory, or first."""
    return order_in_memory(*args[:-1], True)


@settings(max_examples=50, deadline=None)
@given(
    cases(),
    st.sampled_from(["f4", "f8", "c8", "c16", "i2", "f2"]),
    st.booleans(),
    st.sampled_from([order_in_memory, always_last]),
)
def test_transforms_are_those_of_numpy(case, dtype, orthogonal, order):
    ranks, axes, partition, from_partition = case
    shape = tuple(map(sum, ranks.chunks))
    rng, norm = np.random.default_rng(0), "ortho" if orthogonal else None
    x = (9 * rng.normal(size=shape)).astype(dtype)
    if x.dtype.kind == "c":
        x += 1j * rng.normal(size=shape).astype(x.real.dtype)
    along = range(len(shape)) if axes is None else axes
    expected = np.fft.fftn(x.astype("c16"), axes=along, norm=norm)
    # NumPy is exact only to single precision where numbers are.
    close = {"rtol": 0, "atol": 1e-3 if np.dtype(dtype).itemsize < 8 or dtype == "c8" else 1e-10}

    def function(ctx):
        part = x[box_slices(ctx.box_of(from_partition))].copy()
        before = part.copy()
        y = ctx.fftn(part, axes, partition=partition, from_partition=from_partition, norm=norm)
        assert np.array_equal(part, before), "the argument stays unchanged"
        assert y.dtype == np.fft.fft(np.zeros(1, "f4" if dtype == "f2" else dtype)).dtype
        np.testing.assert_allclose(y, expected[box_slices(ctx.box_of(partition))], **close)
        z = ctx.ifftn(y, axes, partition=from_partition, from_partition=partition, norm=norm)
        np.testing.assert_allclose(z, part, **close)
        if x.dtype.kind == "c":
            return
        half = np.fft.rfftn(x.astype("f8"), axes=along, norm=norm)
        y = ctx.rfftn(part, axes, partition=partition, from_partition=from_partition, norm=norm)
        np.testing.assert_allclose(y, half[box_slices(ctx.box_of(partition, half.shape))], **close)
        z = ctx.irfftn(y, axes, partition=from_partition, from_partition=partition, norm=norm)
        assert z.dtype.kind == "f"
        np.testing.assert_allclose(z, part, **close)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transforms, "order_in_memory", order)
        run_gang(ranks, function)


def fake_cufft():
    """The functions of `cupyx.scipy.fft`, by SciPy: new arrays, of the same precision.

    They accept only arrays that cuFFT transforms fast: in C order, along the last axes; or in
    columns along the first one.
    """
    library = ModuleType("cupyx.scipy.fft")
    for name in ("fftn", "ifftn", "rfft", "rfftn", "irfft", "irfftn"):

        def run(block, *args, overwrite_x=False, name=name, norm=None):
            along = args[1] if name.endswith("n") else [args[1]]
            if along == (0,) and block.ndim > 1:
                assert is_quick_along_first(*args[0])
                assert block[0].flags.c_contiguous
                assert overwrite_x or block.flags.c_contiguous
            else:
                assert block.flags.c_contiguous
                assert sorted(along) == [*range(block.ndim)][-len(along) :]
            assert name in ("fftn", "ifftn") or along[-1] == block.ndim - 1
            result = block.apply(lambda values: getattr(scipy.fft, name)(values, *args, norm=norm))
            if overwrite_x:
                block.values.fill(np.nan)
            return result

        setattr(library, name, run)
    return library


@settings(max_examples=25, deadline=None)
@given(
    cases(),
    st.sampled_from([(0, "f8"), (0, "c16"), (0, "c8"), (64, "c8")]),  # elements of one word
    st.sampled_from([1, 2**30]),
    st.booleans(),
    st.sampled_from([None, "ortho", "forward"]),
)
def test_ranks_on_gpus(case, how, piece_bytes, is_reversed, norm):
    """Local blocks may be made piece by piece. Peers read them after their events."""
    ranks, axes, partition, from_partition = case
    part_bytes, dtype = how
    shape = tuple(map(sum, ranks.chunks))
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    transform = np.fft.rfftn if x.dtype.kind == "f" else np.fft.fftn
    along = range(len(shape)) if axes is None else axes
    expected = transform(x, axes=along, norm=norm)

    def function(gpu, ctx):
        transform_block, inverse = (
            (ctx.rfftn, ctx.irfftn) if x.dtype.kind == "f" else (ctx.fftn, ctx.ifftn)
        )
        local_block = x[box_slices(ctx.box_of(from_partition))]
        a = filled(gpu, local_block.T).transpose() if is_reversed else filled(gpu, local_block)
        y = transform_block(a, axes, partition=partition, from_partition=from_partition, norm=norm)
        assert np.array_equal(a.get(), local_block)
        overwritten(gpu, a, -1)
        box = box_slices(ctx.box_of(partition, expected.shape))
        np.testing.assert_allclose(y.get(), expected[box], rtol=0, atol=1e-4)
        z = inverse(y, axes, partition=from_partition, from_partition=partition, norm=norm)
        overwritten(gpu, y, -1)
        np.testing.assert_allclose(z.get(), local_block, rtol=0, atol=1e-4)

    with pytest.MonkeyPatch.context() as patch:
        gpu = emulated_gpu(patch)
        library = fake_cufft()
        patch.setattr(local_fft, "_import_fft_module", lambda names: library)
        tune(patch, transform_piece_bytes=piece_bytes)
        run_on_gpus(gpu, ranks, partial(function, gpu), part_bytes=part_bytes)


def test_other_arrays_than_those_of_the_section():
    x = np.random.default_rng(0).normal(size=(5, 7))

    def function(ctx):
        rows = x[box_slices(ctx.box_of((0,), x.shape))]
        y = ctx.rfftn(rows, partition=(1,), shape=x.shape, from_partition=(0,))
        expected = np.fft.rfftn(x)
        np.testing.assert_allclose(y, expected[box_slices(ctx.box_of((1,), expected.shape))])
        z = ctx.irfftn(y, from_partition=(1,), partition=(0,), shape=x.shape)
        np.testing.assert_allclose(z, rows)

    run_gang(RankGrid(((1, 1, 1),), (3,)), function)


@pytest.mark.parametrize("real", [False, True])
def test_wavenumbers_are_those_of_the_transform(real):
    n, m = 12, 9
    x = 2 * np.pi * np.arange(n)[:, None] / n
    y = 2 * np.pi * np.arange(m) / m
    f = np.sin(3 * x) * np.cos(2 * y)

    def function(ctx):
        transform, inverse = (ctx.rfftn, ctx.irfftn) if real else (ctx.fftn, ctx.ifftn)
        waves = transform(f[box_slices(ctx.box)], partition=(1,))
        kx, ky = ctx.wavenumbers((2 * np.pi / n, 2 * np.pi / m), partition=(1,), real=real)
        assert np.broadcast_shapes(kx.shape, ky.shape) == waves.shape
        laplacian = inverse(-(kx**2 + ky**2) * waves, from_partition=(1,))
        np.testing.assert_allclose(laplacian, -13 * f[box_slices(ctx.box)], atol=1e-12)
        (local_block,) = ctx.wavenumbers(0.5, axes=(0,), partition=(1,))
        assert np.array_equal(local_block, 2 * np.pi * np.fft.fftfreq(n, 0.5)[:, None])

    run_gang(RankGrid(((5, 1, 6), (m,)), (3, 1)), function)


def test_slabs_take_one_exchange(monkeypatch):
    x = np.ones((4, 6, 3))
    calls = noted(monkeypatch, Connections, "begin", lambda _, call, *args: call.partition(" ")[0])

    def function(ctx):
        y = ctx.fftn(x[box_slices(ctx.box)], partition=(1,))
        ctx.ifftn(y, from_partition=(1,))

    run_gang(RankGrid(((1, 1, 2), (6,), (3,)), (2, 1, 1)), function)
    assert Counter(call for call in calls if call != "finalize()") == {"fftn()": 2, "ifftn()": 2}


def test_what_is_wrong_is_named():
    ctx = Context(RankGrid(((4,), (3,)), (1, 1)))
    x = np.ones((4, 3))
    for call, match in (
        (lambda: ctx.fftn(x, (0, 0)), "expected axes of an array of 2 dimensions, each once"),
        (lambda: ctx.fftn(x, partition=(2,)), "partition: expected a sequence of axes"),
        (lambda: ctx.ifftn(x, from_partition=(2,)), "from_partition: expected a sequence of axes"),
        (lambda: ctx.wavenumbers(axes=(3,)), "expected axes of an array of 2 dimensions"),
        (lambda: ctx.fftn(x.T), r"a: expected an array of shape \(4, 3\)"),
        (lambda: ctx.irfftn(x), r"a: expected an array of shape \(4, 2\)"),
        (lambda: ctx.fftn(x.astype("M8[s]")), "a: expected numbers, got dtype datetime64"),
        (lambda: ctx.rfftn(x + 1j), "a: expected real numbers, got dtype complex128"),
        (lambda: ctx.fftn(x, norm="none"), "expected a norm of"),
        (lambda: ctx.fftn(x, shape=(4, -1)), "shape: expected lengths of axes"),
        (lambda: ctx.fftn(np.ones((0, 3)), shape=(0, 3)), "expected elements along the axes"),
        (lambda: ctx.wavenumbers("a"), "spacing: expected a number, .* got 'a'"),
        (lambda: ctx.wavenumbers((1, 2, 3)), "one for each of 2 axes"),
    ):
        with pytest.raises(InputError, match=match):
            call()
    with pytest.raises(UnsupportedArrayError, match=r"numpy\.ma"):
        ctx.fftn(np.ma.masked_equal(x, 1))

    def differing(ctx):
        part = np.ones((2, 4), complex)
        return ctx.redistribute(part, (1,)) if ctx.rank else ctx.fftn(part, partition=(1,))

    error = r"call 1 was fftn\(\) of \(4, 4\), \(2, 1\) to \(1, 2\)"
    with pytest.raises(SectionError, match=error):
        run_gang(RankGrid(((2, 2), (4,)), (2, 1)), differing)
