"""Peer-to-peer rechunks of Dask, as tasks that assemble blocks from regions.

With a client Dask itself chooses this method for many arrays, also where it aligns the blocks of
``x + y``. Its tasks wait for each other on the workers, so ranks cannot run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask_p2p.config import Options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.errors import FuseError
from dask_p2p.graph.layer import assemble_tasks
from dask_p2p.plans.grid import redistribution
from dask_p2p.types import Key

#: Name of the class of Dask's layers, which is imported only where Dask has made one.
_LAYER = "P2PRechunkLayer"
_ANY: Any = None  # the layer has no dtype: blocks get that of their sources


def tasks_of_layer(layer: Mapping[Key, Any], options: Options) -> Mapping[Key, Any]:
    """Return the tasks of a layer; for a peer-to-peer rechunk, `AssembleTask` under the same keys.

    Raises `FuseError` if the rechunk has unknown chunk sizes or empty blocks.
    """
    if type(layer).__name__ != _LAYER:
        return layer
    rechunk: Any = layer
    before, after = rechunk.chunks_input, rechunk.chunks
    if any(size != size or not size for sizes in (*before, *after) for size in sizes):
        raise FuseError(
            f"expected known chunk sizes of at least 1 in a rechunk inside a fused graph, got "
            f"{before} and {after} in {rechunk.name}. Call x.compute_chunk_sizes() before it."
        )
    plan = redistribution(before, range(len(before)), after)
    output = OutputSpec((rechunk.name_input,), _ANY, "numpy", options)
    return assemble_tasks(rechunk.name, plan, output)
