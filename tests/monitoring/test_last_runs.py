"""`last_runs` on clusters: the figures are those of the placement."""

import logging
import time
from collections import Counter
from itertools import product
from logging.handlers import BufferingHandler

import dask
import dask.array as da
import pytest
from distributed import Event, wait

import dask_p2p
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.errors import InputError, TransferError
from dask_p2p.monitoring.runs import fetch_records
from dask_p2p.plugins.context import FALLBACK_TOPIC
from tests.support import BOUND_S, in_process, indexed, spread
from tests.transports.loopback import wait_until

BY_MESSAGES = {"p2p.transports.order": ["comm"]}


@pytest.fixture
def x(client):
    """Four row slabs of 16 x 64, one on each worker."""
    return spread(client, da.from_array(indexed((64, 64), float), chunks=(16, 64)))


def compute_in_place(client, y):
    """Compute an array where it falls, and return its run and the workers of its blocks."""
    y = client.persist(y)
    wait(y)
    readers = {key: who[0] for key, who in client.who_has(y).items()}
    run = dask_p2p.last_runs(client, n=1)[0]
    assert run.name == y.name
    return run, readers


def holder_of(client, x, row):
    return client.who_has(x)[x.name, row, 0][0]


@pytest.mark.usefixtures("without_stealing")
def test_a_transpose(client, x):
    before_s = time.time()
    run, readers = compute_in_place(client, dask_p2p.transpose(x))
    holders = [holder_of(client, x, row) for row in range(4)]
    tile_bytes = 16 * 16 * 8
    tiles = Counter(pair for pair in product(readers.values(), holders) if len({*pair}) == 2)
    expected = {pair: count * tile_bytes for pair, count in tiles.items()}
    assert {pair[:2]: nbytes for pair, nbytes in run.pairs.items()} == expected
    assert run.least_bytes == run.moved_bytes == sum(expected.values()) == 12 * tile_bytes
    assert (run.operation, run.shape, run.dtype) == ("p2p-transpose", (64, 64), "float64")
    assert (run.blocks, len(run.made), run.attempts) == ((4, 1), 4, 4)
    assert (run.failures, run.fallbacks) == ((), {})
    assert before_s <= run.start_s <= run.stop_s <= time.time()
    assert 0 < run.longest_task_s <= run.wall_s
    assert run.gbs == pytest.approx(run.moved_bytes / run.wall_s / 1e9)
    assert run.transports == {"cma": 12}
    for record in run.made:
        assert (record.worker, record.shape) == (readers[record.key], (16, 64))
        assert (record.nbytes, record.dtype) == (16 * 64 * 8, "float64")
        for stage in record.stages:
            assert 0 < stage.waited_s <= stage.wire_s <= record.stop_s - record.start_s + 0.01
            assert 0 < stage.begun_s < record.stop_s - record.start_s + 0.01
            assert stage.kernel_s > 0
        spent_s = record.kernel_s + sum(s.waited_s + s.kernel_s for s in record.stages)
        assert 0 < record.kernel_s < spent_s < record.stop_s - record.start_s + 0.01


@pytest.mark.usefixtures("without_stealing")
def test_halos(client, x):
    y = dask_p2p.map_overlap(lambda block: block * 1.0, x, {0: 1}, "periodic")
    run, _ = compute_in_place(client, y)
    assert run.moved_bytes == 8 * 64 * 8
    assert (run.operation, run.shape, run.blocks) == ("p2p-overlap", (64, 64), (4, 1))
    assert {record.shape for record in run.made} == {(16, 64)}, "without the halos"


def test_each_computation_is_a_run_and_the_newest_comes_first(client, x):
    y = dask_p2p.transpose(x)
    for _ in range(2):
        y.compute()
    dask_p2p.rechunk(x, (64, 16)).compute()
    runs = dask_p2p.last_runs(client, n=3)
    assert [run.operation for run in runs] == ["p2p-rechunk", "p2p-transpose", "p2p-transpose"]
    assert [run.attempts for run in runs] == [4, 4, 4]
    assert runs[1].start_s > runs[2].stop_s
    records = client.sync(fetch_records, client, 2)
    assert set(records) == {*runs[0].records, *runs[1].records}


def test_an_argument_of_a_delayed_function_moves_as_regions(client, x):
    """Dask wraps its tasks into others, with other keys."""
    total = dask.delayed(lambda block: float(block.sum()))(dask_p2p.transpose(x))
    assert total.compute() == float(indexed((64, 64), float).sum())
    (run,) = dask_p2p.last_runs(client, n=1)
    assert (run.operation, run.state, len(run.made)) == ("p2p-transpose", "done", 4)
    assert 0 < run.moved_bytes == run.least_bytes < x.nbytes
    assert not set(run.transports) & {"", "local"}


def refuse(how_often, dask_worker):
    good = dask_worker.handlers["p2p_comm_read"]
    refusals = [how_often]

    async def reply(**request):
        if refusals[0]:
            refusals[0] -= 1
            return {"status": "error", "message": "on purpose"}
        dask_worker.handlers["p2p_comm_read"] = good
        return await good(**request)

    dask_worker.handlers["p2p_comm_read"] = reply


def test_failed_attempts_are_counted(client, x):
    holder, reader = holder_of(client, x, 3), holder_of(client, x, 0)
    with dask.config.set(BY_MESSAGES):
        y = dask_p2p.transpose(x)[:16]
    client.run(refuse, 2, workers=[holder])
    wait(client.compute(y, workers=[reader]))
    run = dask_p2p.last_runs(client, n=1)[0]
    assert (run.attempts, len(run.made), run.blocks) == (3, 1, (4, 1))
    (reason,) = run.failures
    assert holder in reason
    assert "on purpose" in reason
    assert run.least_bytes == 3 * 16 * 16 * 8
    # What the others sent came in vain, as far as it had come by then.
    assert run.least_bytes <= run.moved_bytes <= 3 * run.least_bytes
    assert run.fallbacks == {}


def test_a_task_that_never_ends_well_is_there_too(client, x):
    holder, reader = holder_of(client, x, 3), holder_of(client, x, 0)
    with dask.config.set(BY_MESSAGES | {"p2p.attempts": 2}):
        y = dask_p2p.transpose(x)[:16]
    client.run(refuse, 2, workers=[holder])
    with pytest.raises(TransferError):
        client.compute(y, workers=[reader]).result(timeout=BOUND_S)
    run = dask_p2p.last_runs(client, n=1)[0]
    assert (run.attempts, run.made, run.dtype) == (2, (), "")
    assert "0 of 4 x 1" in repr(dask_p2p.last_runs(client, n=1))


def fall_back(holder, dask_worker):
    from dask_p2p.transports.router import Route

    router = dask_worker.plugins[PLUGIN_NAME].context.router
    error = TransferError(f"cma: {holder} on purpose", reason="on purpose")
    router.record_failure(Route(holder, router.transports["cma"]), error, last=False)


def recover(holder, dask_worker):
    dask_worker.plugins[PLUGIN_NAME].context.router.failures.pop((holder, "cma"))


def test_pairs_that_fell_back_stand_out(client, x):
    holder, reader = holder_of(client, x, 1), holder_of(client, x, 0)
    dask_p2p.transpose(x).compute()  # the workers have found their routes
    client.run(listen)
    for _ in range(2):
        client.run(fall_back, holder, workers=[reader])
    try:
        y = client.compute(dask_p2p.transpose(x)[:16], workers=[reader])
        wait(y)
    finally:
        client.run(recover, holder, workers=[reader])
        texts_of = {worker: texts for worker, texts in client.run(heard).items() if texts}
    run = dask_p2p.last_runs(client, n=1)[0]
    assert run.transports == {"cma": 2, "comm": 1}
    assert run.pairs[reader, holder, "comm"] == 16 * 16 * 8
    assert list(run.fallbacks) == [(reader, holder, "cma")]
    assert "on purpose" in run.fallbacks[reader, holder, "cma"]
    (text,) = texts_of[reader]
    assert list(texts_of) == [reader]
    for part in (reader, holder, "cma", "on purpose", "name another order"):
        assert part in text
    _, event = client.get_events(FALLBACK_TOPIC)[-1]
    assert (event["worker"], event["holder"], event["transport"]) == (reader, holder, "cma")
    assert "on purpose" in event["reason"]
    assert "name another order" in event["remedy"]


def listen(dask_worker):
    dask_worker.heard = BufferingHandler(1000)
    dask_worker.heard.setLevel(logging.DEBUG + 1)
    logger = logging.getLogger("dask_p2p")
    logger.addHandler(dask_worker.heard)
    logger.setLevel(logging.DEBUG)


def heard(dask_worker):
    logger = logging.getLogger("dask_p2p")
    logger.removeHandler(dask_worker.heard)
    logger.setLevel(logging.NOTSET)
    return [record.getMessage() for record in dask_worker.heard.buffer]


def test_a_healthy_run_says_nothing(client, x):
    dask_p2p.register(client)
    client.run(listen)
    dask_p2p.transpose(x).compute()
    dask_p2p.last_runs(client)
    assert set(map(tuple, client.run(heard).values())) == {()}


def test_wrong_numbers(client):
    for n in (0, -1, 1.5, "all", None):
        with pytest.raises(InputError, match=r"at least 1, got n="):
            dask_p2p.last_runs(client, n=n)


async def test_async_clients_and_clusters_without_the_plugin():

    async with in_process() as (_, client):
        assert await dask_p2p.last_runs(client) == ()
        await dask_p2p.register(client)
        assert await dask_p2p.last_runs(client) == ()
        y = dask_p2p.transpose(da.ones((8, 6), chunks=(2, 6)))
        await client.compute(y)
        (run,) = await dask_p2p.last_runs(client)
        assert (run.shape, run.attempts) == ((6, 8), 4)


def newest_run(client, has_ended=lambda run: run.state != "running"):
    return wait_until(lambda: next(filter(has_ended, dask_p2p.last_runs(client, 1)), None))


@pytest.mark.parametrize("is_released", [False, True])
def test_a_cancelled_section_has_not_failed(client, x, is_released):
    """It keeps the bytes that have moved, and its dtype."""
    steps = {"steps": 10_000, "depth": 1, "boundary": "periodic", "ranks": 2}
    y = dask_p2p.iterate(endless_step, x, **steps).persist()
    before = newest_run(client, lambda run: run.state == "running" and run.steps > 5)
    assert before.dtype == "float64"
    assert before.moved_bytes > 0
    if is_released:
        del y
    else:
        client.cancel(y)
    run = newest_run(client)
    assert (run.name, run.state) == (before.name, "cancelled")
    assert (run.failures, run.dtype) == ((), "float64")
    wait_until(lambda: not dask_p2p.last_runs(client, 1)[0].under_way)
    run = dask_p2p.last_runs(client, 1)[0]
    assert run.state == "cancelled"
    assert run.moved_bytes >= before.moved_bytes
    assert "cancelled" in repr(dask_p2p.last_runs(client, 1))


def endless_step(u):
    time.sleep(0.01)
    return u + 1


def held_block(block):
    Event("held-block").wait(BOUND_S)
    return block


def test_a_cancelled_exchange_is_cancelled(client, x):
    Event("held-block", client=client).clear()
    y = dask_p2p.map_overlap(held_block, x, depth=1, boundary=0.0, meta=x._meta).persist()
    wait_until(lambda: any(run.under_way for run in dask_p2p.last_runs(client, 1)))
    client.cancel(y)
    wait_until(lambda: dask_p2p.last_runs(client, 1)[0].state == "cancelled")
    Event("held-block", client=client).set()
    wait_until(lambda: not dask_p2p.last_runs(client, 1)[0].under_way)
    assert dask_p2p.last_runs(client, 1)[0].state == "cancelled"
    dask_p2p.map_overlap(held_block, x, depth=1, boundary=0.0, meta=x._meta).compute()
    assert [run.state for run in dask_p2p.last_runs(client, 2)] == ["done", "cancelled"]


def fails_at_3(ctx, x):
    for step in ctx.steps(10):
        ctx.allreduce(x)
        if step == 3:
            raise ValueError("on purpose")
    return x


def fails(block):
    raise ValueError("on purpose")


def test_failed_runs_are_marked(client, x):
    section = dask_p2p.spmd(fails_at_3, x, ranks=2)
    exchange = dask_p2p.map_overlap(fails, x, depth=1, meta=x._meta)
    for operation, y in ("p2p-spmd", section), ("p2p-overlap", exchange):
        # With a sum Dask releases the other tasks, as if they were cancelled.
        for task in (y, y.sum()):
            with pytest.raises(ValueError, match="on purpose"):
                task.compute()
            newest_run(client, lambda run, name=operation: run.operation == name)
            wait_until(lambda: dask_p2p.last_runs(client, 1)[0].state == "failed")
            assert "failed" in repr(dask_p2p.last_runs(client, 1))
            wait_until(lambda: not dask_p2p.last_runs(client, 1)[0].under_way)
    spmd_run = dask_p2p.last_runs(client, 4)[-1]
    assert (spmd_run.operation, spmd_run.dtype, spmd_run.steps) == ("p2p-spmd", "float64", 3)
    assert spmd_run.moved_bytes > 0
    assert "ValueError: on purpose" in spmd_run.failures
