"""`iterate` and `spmd` with CuPy blocks: values are those of NumPy, and nothing is left behind."""

import os

import dask
import numpy as np
import pytest
from distributed import Client, get_worker

import dask_p2p
from dask_p2p import estimate, iterate, spmd
from dask_p2p.errors import InputError
from dask_p2p.sections.wire.connection import AttemptEndedError
from tests.backends.support import cupy
from tests.gpu.support import free_all_blocks, gpu_client, on_gpu, on_host
from tests.gpu.test_streams import spin
from tests.sections.iterate.test_programs import reference
from tests.sections.support import be_on_hosts, endpoints_of_ucx, nothing_is_left
from tests.support import die_once, own_client, persisted, result_of, tune, tune_here

pytestmark = pytest.mark.gpu(2)

X = np.random.default_rng(0).normal(size=(96, 70))
UNEVEN = ((13, 40, 7, 36), (33, 37))
TOLERANCE = {"f": 1e-5, "d": 1e-13}


def heat(u, out):
    """A five-point stencil with another weight for each side."""
    out[...] = 0.2 * u[1:-1, 1:-1] + 0.1 * u[:-2, 1:-1] + 0.2 * u[2:, 1:-1]
    out += 0.3 * u[1:-1, :-2] + 0.2 * u[1:-1, 2:]


def nine(u, out):
    """A nine-point stencil, with points across corners."""
    out[...] = u[:-2, :-2] + 2 * u[:-2, 2:] + 3 * u[2:, :-2] + 4 * u[2:, 2:] + u[1:-1, 1:-1]
    out /= 11


def check(y, expected, char="d"):
    actual = on_host(y)
    assert actual.dtype == np.dtype(char)
    bound = TOLERANCE[char] * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


# --- one GPU, with and without a cluster


@pytest.mark.gpu(1)
@pytest.mark.parametrize("char", "fd")
@pytest.mark.parametrize("boundary", ["periodic", "nearest", 0.5])
def test_a_rank_alone(char, boundary):
    x = X.astype(char)
    with dask.config.set(scheduler="sync"):
        y = iterate(heat, on_gpu(x, UNEVEN), 1, 12, boundary=boundary, ranks=1)
        check(y, reference(heat, [X], 1, 12, boundary)[0], char)
        y = spmd(lambda ctx, a: a / ctx.allreduce((a * a).sum()), on_gpu(x, UNEVEN), ranks=1)
        check(y, x / (x.astype("d") ** 2).sum(), char)


@pytest.mark.gpu(1)
def test_functions_may_work_on_for_long():
    """Halos, copies to the host and outputs come after the work on the stream."""

    def late(u, out):
        import cupy

        spin(cupy.cuda.get_current_stream(), 20_000_000)
        heat(u, out)
        return out.sum()

    with dask.config.set(scheduler="sync"):
        y = iterate(late, on_gpu(X, UNEVEN), 1, 5, until=lambda total: False, ranks=1)
        check(y, reference(heat, [X], 1, 5, "periodic")[0])


@pytest.mark.gpu(1)
def test_two_workers_of_one_gpu():
    """They also read each other's windows, if the driver permits it."""
    with own_client(threads_per_worker=2):
        y = iterate(heat, on_gpu(X, UNEVEN), 1, 100, ranks=2)
        check(y, reference(heat, [X], 1, 100, "periodic")[0])
        assert [right for right, _ in by_turned()] == [True, True]


# --- two GPUs


@pytest.fixture(params=["windows", "messages"])
def way(request):
    """The method that moves halos. Windows are used if the transport of their memory is enabled."""
    order = ["ipc", "comm"] if request.param == "windows" else ["comm"]
    with dask.config.set({"p2p.transports.order": order}):
        yield request.param


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (200, {"overlap": True}),
        (200, {"overlap": False}),
        (200, {"capture": True}),
        (3, {"capture": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("boundary", ["periodic", "reflect", "nearest", 0.5])
@pytest.mark.parametrize("char", "fd")
def test_heat(client, way, char, boundary, steps, options):
    x = persisted(client, on_gpu(X.astype(char), UNEVEN))
    y = iterate(heat, x, 1, steps, boundary=boundary, **options)
    check(y, reference(heat, [X], 1, steps, boundary)[0], char)
    nothing_is_left(client)


@pytest.mark.parametrize("options", [{}, {"check_every": 5, "capture": True}], ids=str)
def test_until(client, way, options):
    def halves(u, out):
        out[...] = u / 2
        return (out**2).sum()

    y = iterate(halves, on_gpu(X, UNEVEN), 0, 100, until=lambda size: size < 1e-6, **options)
    every = options.get("check_every", 1)
    steps = next(n for n in range(0, 100, every) if ((X / 2**n) ** 2).sum() < 1e-6)
    check(y, X / 2**steps)


# --- steps that are captured


def heat_of(u):
    center = 0.2 * u[1:-1, 1:-1] + 0.1 * u[:-2, 1:-1] + 0.2 * u[2:, 1:-1]
    return center + 0.3 * u[1:-1, :-2] + 0.2 * u[1:-1, 2:]


@pytest.mark.parametrize("late", [0, 1])
def test_captured_steps_of_a_rank_that_is_late(client, way, late):
    """Memory that a graph allocates is its own, and each GPU waits for the other one."""
    second = sorted(client.scheduler_info()["workers"])[late]

    def step(u):
        import cupy

        if get_worker().address == second:
            spin(cupy.cuda.get_current_stream(), 1_000_000)
        return heat_of(u)

    y = iterate(step, on_gpu(X, UNEVEN), 1, 60, capture=True)
    check(y, reference(heat, [X], 1, 60, "periodic")[0])


@pytest.mark.parametrize("how", ["reads", "waits", "counts"])
def test_what_cannot_be_captured(client, way, how):
    steps = []

    def looks(u, out):
        import cupy

        heat(u, out)
        if how == "reads":
            float(out.max())
        elif how == "waits":
            cupy.cuda.get_current_stream().synchronize()
        elif way == "windows":
            steps.append(None)
            out += len(steps)

    y = iterate(looks, on_gpu(X, UNEVEN), 1, 50, capture=True)
    if way == "windows":
        words = "differ from its own" if how == "counts" else "that only enqueues work on the"
        with pytest.raises(InputError, match=f"capture: expected a function .*{words}"):
            y.compute()
        nothing_is_left(client)
        y = iterate(heat, on_gpu(X, UNEVEN), 1, 50, capture=True)
    check(y, reference(heat, [X], 1, 50, "periodic")[0])


def exchanging(ctx, x):
    total = ctx.allreduce(x.sum())
    turned = ctx.redistribute(x, partition=(1,))
    restored = ctx.redistribute(turned, from_partition=(1,))
    waves = ctx.fftn(restored, partition=(1,))
    again = ctx.ifftn(waves, from_partition=(1,)).real
    ctx.barrier()
    return again / total, x.max()


def test_spmd_with_all_it_can_do(client, way):
    y, maximum = spmd(exchanging, on_gpu(X, (24, 70)), partition=(0,), per_rank=[0.0])
    np.testing.assert_allclose(on_host(y), X / X.sum(), rtol=1e-9)
    assert maximum.compute().max() == X.max()


CUBE = np.arange(96 * 70 * 12).reshape(96, 70, 12) % 100
CUBE_CHUNKS = ((13, 40, 7, 36), (33, 37), (12,))


def turned(ctx, x, axes, to):
    """Return whether a local block of another partition is right, and any data crossed the host."""
    host_bytes, to_host, out = [], ctx.device.to_host, None
    ctx.device.to_host = lambda value: host_bytes.append(value.nbytes) or to_host(value)
    for _ in range(3):
        x += 1  # other ranks may not have read it yet
        out = ctx.redistribute(x, to, axes=axes, out=out)
    shape = tuple(CUBE.shape[axis] for axis in axes)
    box = tuple(slice(*bounds) for bounds in ctx.box_of(to, shape))
    expected = (CUBE + 3).transpose(axes)[box].astype(x.dtype)
    return x, np.array([np.array_equal(out.get(), expected), bool(host_bytes)])


def by_turned(char="f", axes=(1, 0, 2), to=(0,)):
    x = on_gpu(CUBE.astype(char), CUBE_CHUNKS)
    options = {"axes": axes, "to": to, "ranks": 2}
    _, matches = spmd(turned, x, per_rank=[np.zeros(2, "?")], **options)
    return matches.compute().tolist()


def there_and_back(ctx, x, real, piece_bytes, axes, is_reversed):
    """Return the relative errors of a transform, compared with NumPy, and of its inverse."""
    if is_reversed:  # in Fortran order
        x = x.copy(order="F")
    cube = CUBE.astype(x.dtype)
    forward, inverse, numpy_forward = ctx.fftn, ctx.ifftn, np.fft.fftn
    if real:
        forward, inverse, numpy_forward = ctx.rfftn, ctx.irfftn, np.fft.rfftn
    spectrum = numpy_forward(cube.astype("d" if real else "D"), axes=axes)
    options, original = {"axes": axes, "shape": cube.shape}, x.copy()
    with pytest.MonkeyPatch.context() as patch:
        tune(patch, transform_piece_bytes=piece_bytes)
        for _ in range(2):
            y = forward(x, partition=(1,), from_partition=(0,), **options)
            z = inverse(y, partition=(0,), from_partition=(1,), **options)
    box = tuple(slice(*bounds) for bounds in ctx.box_of((1,), spectrum.shape))
    errors = abs(y.get() - spectrum[box]).max() / abs(spectrum).max(), abs(z - original).max() / 100
    return x, np.array([*map(float, errors), float(abs(x - original).max())])


def check_transforms(char, axes, is_reversed, piece_bytes):
    """Check the results of `there_and_back` on two ranks, the larger of both."""
    x = on_gpu(CUBE.astype(char), (CUBE_CHUNKS[0], -1, -1))
    options = {"real": char in "fd", "piece_bytes": piece_bytes, "axes": axes}
    options |= {"is_reversed": is_reversed, "ranks": 2}
    _, errors = spmd(there_and_back, x, per_rank=[np.zeros(3)], **options)
    forward_error, inverse_error, changed = errors.compute().max(axis=0)
    assert changed == 0
    assert max(forward_error, inverse_error) < (1e-6 if char in "fF" else 1e-14)


@pytest.mark.parametrize("piece_bytes", [2**10, 2**30])
@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2), (0,), (1, 0)])
@pytest.mark.parametrize("char", "fFdD")
@pytest.mark.parametrize("is_reversed", [False, True])
def test_transforms(client, way, is_reversed, char, axes, piece_bytes):
    """Other ranks read the first piece of a local block while the next one is transformed."""
    check_transforms(char, axes, is_reversed, piece_bytes)


@pytest.mark.parametrize("staging", ["0 B", "384 KiB", "384 MiB"])
@pytest.mark.parametrize(
    ("axes", "to"),
    [((0, 1, 2), (1,)), ((1, 0, 2), (0,)), ((2, 1, 0), (1,)), ((2, 0, 1), (0,)), ((1, 2, 0), (1,))],
)
@pytest.mark.parametrize("char", ["f", "D", "b", "e"])
def test_redistribute(client, way, char, axes, to, staging):
    """Parts are read by kernels, or by copy engines, or sent through the host."""
    with dask.config.set({"p2p.transports.ipc.staging-bytes": staging}):
        assert by_turned(char, axes, to) == [[True, way == "messages"]] * 2


def pretend(is_far):
    """Put ranks here on a host of their own, with UCX for small messages too; or undo both."""
    from dask_p2p.sections.wire import endpoint

    namespace = endpoint.kernel_and_namespace()[0]
    be_on_hosts(lambda: f"{namespace}-{os.getpid()}" if is_far else namespace)
    tune_here(ucx_message_bytes=64 if is_far else 1 << 16)


@pytest.fixture
def far(client):
    """Ranks that seem to be on different hosts, with UCX between them."""
    client.run(pretend, True)
    with dask.config.set({"p2p.transports.order": ["ipc", "ucx", "comm"]}):
        yield
    client.run(pretend, False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("char", "fd")
def test_halos_by_ucx(client, far, char, overlap):
    y = iterate(heat, on_gpu(X.astype(char), UNEVEN), 1, 30, overlap=overlap)
    check(y, reference(heat, [X], 1, 30, "periodic")[0], char)
    assert all(client.run(endpoints_of_ucx).values())


@pytest.mark.parametrize(("axes", "to"), [((0, 1, 2), (1,)), ((1, 0, 2), (0,)), ((2, 0, 1), (0,))])
@pytest.mark.parametrize("char", ["f", "D", "b", "e"])
def test_redistribute_by_ucx(client, far, char, axes, to):
    assert by_turned(char, axes, to) == [[True, False]] * 2


@pytest.mark.parametrize("piece_bytes", [2**10, 2**30])
@pytest.mark.parametrize("char", "fFdD")
def test_transforms_by_ucx(client, far, char, piece_bytes):
    check_transforms(char, (0, 1, 2), False, piece_bytes)


@pytest.mark.parametrize(
    "settings",
    [
        {"rmm_pool_size": None, "rmm_allocator_external_lib_list": None},
        {"rmm_async": True, "rmm_allocator_external_lib_list": ["cupy"]},
    ],
    ids=["CuPy's pool", "async"],
)
def test_redistribute_memory_of_other_allocators(settings):
    """Windows are shareable, whatever memory their regions come from."""
    with dask_p2p.local_cluster(2, gpus=True, **settings) as cluster, Client(cluster) as client:
        for _ in range(3):
            assert by_turned() == [[True, False]] * 2
            client.run(free_all_blocks)


def test_memory_that_goes_back_to_the_driver():
    """Memory that others have mapped is freed, and other memory has its address."""

    def gives_memory_back(ctx, x):
        for _ in range(10):
            turned = ctx.redistribute(x, (1,))
            x = ctx.redistribute(turned + 1, from_partition=(1,)) * 1
            del turned
            free_all_blocks()
        return x

    x = np.random.default_rng(0).integers(0, 1000, (2000, 3000))
    with gpu_client(rmm_pool_size=None, rmm_allocator_external_lib_list=None):
        assert np.array_equal(on_host(spmd(gives_memory_back, on_gpu(x, (1000, 3000)))), x + 10)


def test_late_kernels_and_redistributions(client, way):
    """A local block is not read before it is written, and not overwritten before it is read."""

    def late(ctx, x):
        for step in range(20):
            if step % 2 == ctx.rank:
                spin(cupy.cuda.get_current_stream(), 20_000_000)
            turned = ctx.redistribute(x, (1,))
            x[...] = -1
            turned += 1
            x = ctx.redistribute(turned, from_partition=(1,))
            turned[...] = -1
        return x

    x = np.random.default_rng(0).integers(0, 1000, (96, 70))
    assert np.array_equal(on_host(spmd(late, on_gpu(x, (48, 70)))), x + 20)


def averaged(steps):
    """The values of steps that replace each row by the mean of its neighbours."""
    values = X
    for _ in range(steps):
        values = (np.roll(values, 1, 0) + np.roll(values, -1, 0)) / 2
    return values


def test_late_kernels_and_windows(client, way):
    """The GPU of one rank waits for the other rank, which is late."""

    def late(ctx, x):
        p = ctx.with_halo(x, depth={0: 1}, boundary="periodic")
        for step in range(20):
            if step % 2 == ctx.rank:
                spin(cupy.cuda.get_current_stream(), 20_000_000)
            ctx.update_halo(p)
            p.inner[...] = (p.data[:-2] + p.data[2:]) / 2
        return p.inner

    check(spmd(late, on_gpu(X, (48, 70))), averaged(20))


def test_estimate_has_the_memory_of_the_gpu(client):
    memory = estimate(iterate(heat, on_gpu(X, UNEVEN), 1, 5))
    assert memory.kind == "cupy"
    assert memory.packed_bytes == 2 * memory.step_bytes
    assert memory.host_bytes >= memory.state_bytes > 0


# --- a killed rank


def dies_once(ctx, x, path, steps):
    """Kill its process halfway, between the exchanges of the two ranks."""
    p = ctx.with_halo(x, depth={0: 1}, boundary="periodic")
    for step in ctx.steps(steps, ctx.state(p=p), every=10):
        ctx.update_halo(p)
        p.inner[...] = (p.data[:-2] + p.data[2:]) / 2
        if step == steps // 2 and ctx.rank == 0:
            die_once(path)
    return p.inner


@pytest.mark.parametrize("steps", [50, 200])
def test_a_killed_rank(tmp_path, way, steps):
    """All ranks begin again at the last checkpoint, on another worker or on a restarted one.

    The other GPU may wait for an event that never happens: then its waits
    end, and all ranks begin again.
    """
    with gpu_client() as client:
        path = str(tmp_path / "died")
        y = spmd(dies_once, on_gpu(X, (48, 70)), path=path, steps=steps)
        y = y.map_blocks(lambda block: block.get(), meta=np.empty((0, 0)))
        actual = result_of(client, client.compute(y), timeout_s=200)
        assert os.path.exists(path)
        np.testing.assert_allclose(actual, averaged(steps), rtol=1e-12)
        nothing_is_left(client)


def spills(ctx, x):
    """The worker's store is filled while the rank runs: the rank's arrays stay."""
    p = ctx.with_halo(x, depth={0: 1}, boundary="periodic")
    addresses = {p.data.data.ptr}
    for _ in range(200):
        ctx.update_halo(p)
        p.inner[...] = (p.data[:-2] + p.data[2:]) / 2
        addresses.add(p.data.data.ptr)
    assert len(addresses) == 1
    return p.inner


def test_ranks_work_where_blocks_are_spilled():
    with gpu_client(device_memory_limit="40 MB") as client:
        other_blocks = persisted(client, on_gpu(np.ones((2048, 2048), "f4"), (512, 2048)))
        x = on_gpu(X.astype("f4"), (48, 70))
        check(spmd(spills, x), averaged(200), "f")
        assert float(other_blocks.sum().compute()) == 2048**2


# --- arrays that a function returns and keeps are right by default


def two_fields(ctx, x, mask):
    p = ctx.with_halo(x, boundary="periodic")
    first = ctx.update_halo(p)
    p.inner[...] = -x
    second = ctx.update_halo(p)
    inner = (slice(1, -1),) * 2
    return (first - second)[inner] / 2, (first[2:, 2:] == -second[2:, 2:]) & mask, x > 1e9


def test_fields_in_one_halo_array_and_outputs_of_other_dtypes(client, way):
    x, mask = on_gpu(X, (48, 70)), on_gpu(X > 0, (48, 70))
    y, same, none = spmd(two_fields, x, mask, outputs=3, dtype=("f8", bool, bool))
    assert [result.dtype for result in (y, same, none)] == ["f8", "?", "?"]
    check(y, X)
    for actual, expected in ((same, X > 0), (none, X > 1e9)):
        assert on_host(actual).dtype == bool
        assert np.array_equal(on_host(actual), expected)


def test_corners_that_are_left_out_show(client, way):
    def corners(ctx, x):
        halo = ctx.update_halo(ctx.with_halo(x, boundary="periodic", corners=False))
        return x + 0, int(ctx.device.module.isnan(halo).sum())

    y, corner_counts = spmd(corners, on_gpu(X, (48, 70)), per_rank=[0])
    check(y, X)
    assert corner_counts.compute().tolist() == [4, 4]


def test_a_state_that_does_not_change_begins_at_the_start(client, tmp_path):
    """The array on the GPU is compared with its copy on the host."""
    path = tmp_path / "tried"

    def tries(ctx, x):
        y, first = x.copy(), None
        for step in ctx.steps(20, ctx.state(x=x), every=5):
            first = step if first is None else first
            y += 1
            if step == 12 and ctx.rank and not path.exists():
                path.touch()
                raise AttemptEndedError("for a test")
        return y, first

    y, first_steps = client.persist([*spmd(tries, on_gpu(X, (48, 70)), per_rank=[0])])
    check(y, X + 20)
    assert first_steps.compute().tolist() == [0, 0]
