"""Peer-to-peer transposes, rechunks and halo exchanges of Dask arrays.

>>> import dask_p2p
>>> y = dask_p2p.transpose(x)  # doctest: +SKIP

Functions and classes load at their first use, since the `dask` command imports this package at each
start, for its subcommands.
"""

from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dask_p2p import errors as errors
from dask_p2p.config import ensure_defaults
from dask_p2p.errors import *  # noqa: F403  # all names of its __all__
from dask_p2p.loading import call_when_imported, load_module

if TYPE_CHECKING:
    from dask_p2p import fft as fft
    from dask_p2p.fusing.compiled import CompiledFunction as CompiledFunction
    from dask_p2p.fusing.compiled import compile as compile  # noqa: A004
    from dask_p2p.fusing.fused import fused as fused
    from dask_p2p.fusing.optimizer import explain as explain
    from dask_p2p.fusing.resident.client import Handle as Handle
    from dask_p2p.fusing.resident.client import ResidentGang as ResidentGang
    from dask_p2p.monitoring.runs import last_runs as last_runs
    from dask_p2p.on_gpu.map_on_gpu import map_on_gpu as map_on_gpu
    from dask_p2p.ops.estimate import MemoryEstimate as MemoryEstimate
    from dask_p2p.ops.estimate import estimate as estimate
    from dask_p2p.ops.overlap import map_overlap as map_overlap
    from dask_p2p.ops.rechunk import rechunk as rechunk
    from dask_p2p.ops.rechunk import transpose as transpose
    from dask_p2p.plugins.registration import register as register
    from dask_p2p.sections.api.graph import Whole as Whole
    from dask_p2p.sections.api.outputs import Array as Array
    from dask_p2p.sections.api.outputs import LocalBlock as LocalBlock
    from dask_p2p.sections.api.outputs import PerRank as PerRank
    from dask_p2p.sections.api.outputs import Rows as Rows
    from dask_p2p.sections.api.outputs import Same as Same
    from dask_p2p.sections.api.spmd import spmd as spmd
    from dask_p2p.sections.context.grids import Points as Points
    from dask_p2p.sections.iterate.fields import Field as Field
    from dask_p2p.sections.iterate.iterate import iterate as iterate
    from dask_p2p.sections.iterate.output.series import Record as Record
    from dask_p2p.sections.iterate.output.stores import Checkpoint as Checkpoint
    from dask_p2p.sections.iterate.output.stores import Save as Save
    from dask_p2p.tools.check import check as check
    from dask_p2p.tools.cluster import local_cluster as local_cluster
    from dask_p2p.tools.dropin import install as install
    from dask_p2p.tools.dropin import uninstall as uninstall
    from dask_p2p.tools.progress import progress as progress
    from dask_p2p.tools.progress import stalled as stalled

ensure_defaults()

# Module of each function and class. No module may have the name of a function, since importing the
# module would hide the function.
_FUNCTIONS = {
    "Array": "dask_p2p.sections.api.outputs",
    "Checkpoint": "dask_p2p.sections.iterate.output.stores",
    "CompiledFunction": "dask_p2p.fusing.compiled",
    "Field": "dask_p2p.sections.iterate.fields",
    "Handle": "dask_p2p.fusing.resident.client",
    "LocalBlock": "dask_p2p.sections.api.outputs",
    "MemoryEstimate": "dask_p2p.ops.estimate",
    "PerRank": "dask_p2p.sections.api.outputs",
    "Points": "dask_p2p.sections.context.grids",
    "Record": "dask_p2p.sections.iterate.output.series",
    "ResidentGang": "dask_p2p.fusing.resident.client",
    "Rows": "dask_p2p.sections.api.outputs",
    "Same": "dask_p2p.sections.api.outputs",
    "Save": "dask_p2p.sections.iterate.output.stores",
    "Whole": "dask_p2p.sections.api.graph",
    "check": "dask_p2p.tools.check",
    "compile": "dask_p2p.fusing.compiled",
    "estimate": "dask_p2p.ops.estimate",
    "explain": "dask_p2p.fusing.optimizer",
    "fused": "dask_p2p.fusing.fused",
    "install": "dask_p2p.tools.dropin",
    "iterate": "dask_p2p.sections.iterate.iterate",
    "last_runs": "dask_p2p.monitoring.runs",
    "local_cluster": "dask_p2p.tools.cluster",
    "map_on_gpu": "dask_p2p.on_gpu.map_on_gpu",
    "map_overlap": "dask_p2p.ops.overlap",
    "progress": "dask_p2p.tools.progress",
    "rechunk": "dask_p2p.ops.rechunk",
    "register": "dask_p2p.plugins.registration",
    "spmd": "dask_p2p.sections.api.spmd",
    "stalled": "dask_p2p.tools.progress",
    "transpose": "dask_p2p.ops.rechunk",
    "uninstall": "dask_p2p.tools.dropin",
}
__all__ = sorted({*_FUNCTIONS, *errors.__all__})
# Python's imports fail if threads import different modules of one package at the same time.
_loading = RLock()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dask-p2p")
    with _loading:
        if name == "fft":
            return load_module("dask_p2p.fft")
        if name not in _FUNCTIONS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = function = getattr(load_module(_FUNCTIONS[name]), name)
        return function


def _put_option_in_place(_: ModuleType) -> None:
    from dask_p2p.fusing.option import put_in_place_of_graphs

    put_in_place_of_graphs()


def _put_option_of_expressions_in_place(_: ModuleType) -> None:
    from dask_p2p.fusing.option import put_in_place_of_expressions

    call_when_imported("distributed.client", put_in_place_of_expressions)


def __dir__() -> list[str]:
    return [*__all__, "fft", "__version__", *(name for name in globals() if name.startswith("__"))]


call_when_imported("dask.array", _put_option_in_place)
for _expressions in ("dask.array._array_expr", "dask_array"):
    call_when_imported(_expressions, _put_option_of_expressions_in_place)
