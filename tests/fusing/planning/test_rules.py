from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.config import checked_options
from dask_p2p.errors import InputError, UnsupportedArrayError
from dask_p2p.fusing.planning.tasks import keys_of, kind_of, kinds_of, read_graph, tasks_of_layer
from tests.sections.emulated import on_gpu


def test_no_array_and_no_dask_array():
    with pytest.raises(InputError, match="at least one Dask array"):
        dask_p2p.fused()
    with pytest.raises(UnsupportedArrayError, match="from_array"):
        dask_p2p.fused(np.ones(3))
    with pytest.raises(InputError, match="ranks=0"):
        dask_p2p.fused(da.ones(3), ranks=0)


def test_python_objects():
    x = da.from_array(np.array([1, "a", None], dtype=object), chunks=1)
    with pytest.raises(UnsupportedArrayError, match=r"without Python objects.*astype"):
        dask_p2p.fused(x)
    with pytest.raises(UnsupportedArrayError, match=r"p2p-rechunk.*without Python objects"):
        dask_p2p.fused(dask_p2p.rechunk(x, 2).astype(str))


def test_masked_blocks():
    with pytest.raises(UnsupportedArrayError, match="mask"):
        dask_p2p.fused(da.ma.masked_less(da.ones(4, chunks=2), 2))


def test_the_kind_of_blocks(gpu):
    """That of GPUs, if any array of the graph has such blocks."""
    x = on_gpu(gpu, da.ones((4, 4), chunks=2))
    on_host = np.empty((0, 0))
    for y, kind in (
        (x, "cupy"),
        (x.map_blocks(np.copy, meta=on_host), "numpy"),  # nothing shows what it was made of
        (dask_p2p.transpose(x).map_blocks(np.copy, meta=on_host), "cupy"),
        (da.ones((4, 4), chunks=2), "numpy"),
    ):
        layers = [tasks_of_layer(layer, checked_options()) for layer in y.dask.layers.values()]
        tasks = {key: task for layer in layers for key, task in layer.items()}
        assert kind_of(kinds_of([y]), read_graph(tasks, [keys_of(y)])) == kind


@pytest.mark.parametrize(
    "annotations",
    [{"workers": ["alice"]}, {"resources": {"GPU": 1}}, {"retries": 2}, {"priority": 3}],
)
def test_annotations(annotations):
    with dask.annotate(**annotations):
        x = da.ones((8, 8), chunks=(2, 8)) + 1
    with pytest.raises(UnsupportedArrayError, match=f"annotated with {next(iter(annotations))}="):
        dask_p2p.fused(x * 2)
    with dask.annotate(colour="red"):
        x = da.ones((8, 8), chunks=(2, 8)) + 1
    assert dask_p2p.fused(x).compute(scheduler="sync").sum() == 128


def read_twice(block_info=None):
    return np.ones(block_info[None]["chunk-shape"])


def test_annotations_of_tasks_that_stay_with_dask():
    with dask.annotate(retries=2):
        x = da.map_blocks(read_twice, chunks=((2, 2), (8,)), dtype=float)
    y = dask_p2p.fused(x + 1)
    layers = y.__dask_graph__().layers.values()
    assert {tuple((layer.annotations or {}).items()) for layer in layers} == {(), (("retries", 2),)}
    assert y.compute(scheduler="sync").sum() == 64
