"""Types for signatures of users' functions too; `dask_p2p.geometry` has more.

Array libraries share methods but no class, so `Array` is `Any` for type checkers. The classes of
all values that functions of this package pass or return can be imported from here: the context of
a section, halo arrays, runs, reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    SupportsComplex,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
)

if TYPE_CHECKING:  # `dask` imports this package at each start, so imports stay minimal
    import dask.array
    import numpy as np
    from distributed import Client as Client
    from distributed import LocalCluster as LocalCluster
    from numpy.typing import DTypeLike as DTypeLike

    from dask_p2p.fusing.compiled import CompiledFunction as CompiledFunction
    from dask_p2p.fusing.resident.client import Handle as Handle
    from dask_p2p.fusing.resident.client import ResidentGang as ResidentGang
    from dask_p2p.monitoring.records import TaskRecord as TaskRecord
    from dask_p2p.monitoring.runs import Run as Run
    from dask_p2p.monitoring.runs import RunTable as RunTable
    from dask_p2p.ops.estimate import MemoryEstimate as MemoryEstimate
    from dask_p2p.ops.estimate import PartsEstimate as PartsEstimate
    from dask_p2p.ops.fft.estimate import TransformEstimate as TransformEstimate
    from dask_p2p.sections.api.estimate import SectionEstimate as SectionEstimate
    from dask_p2p.sections.context.communicator import Communicator as Communicator
    from dask_p2p.sections.context.context import Context as Context
    from dask_p2p.sections.context.grids import Grid as Grid
    from dask_p2p.sections.context.points import LocalPoints as LocalPoints
    from dask_p2p.sections.context.state import State as State
    from dask_p2p.sections.context.transfers import Transfer as Transfer
    from dask_p2p.sections.exchange.ends import At as At
    from dask_p2p.sections.exchange.halo import HaloArray as HaloArray
    from dask_p2p.sections.exchange.halo import HaloPart as HaloPart
    from dask_p2p.sections.exchange.halo import Pending as Pending
    from dask_p2p.tools.dropin import Installation as Installation
    from dask_p2p.tools.report import HostPair as HostPair
    from dask_p2p.tools.report import Link as Link
    from dask_p2p.tools.report import Problem as Problem
    from dask_p2p.tools.report import Report as Report
    from dask_p2p.tools.report import Status as Status
    from dask_p2p.tools.stalls import RankReport as RankReport
else:
    Client = DTypeLike = LocalCluster = Any


# Modules of classes, which load at their first use.
_CLASSES = {
    "At": "dask_p2p.sections.exchange.ends",
    "Communicator": "dask_p2p.sections.context.communicator",
    "CompiledFunction": "dask_p2p.fusing.compiled",
    "Context": "dask_p2p.sections.context.context",
    "Grid": "dask_p2p.sections.context.grids",
    "HaloArray": "dask_p2p.sections.exchange.halo",
    "HaloPart": "dask_p2p.sections.exchange.halo",
    "Handle": "dask_p2p.fusing.resident.client",
    "HostPair": "dask_p2p.tools.report",
    "Installation": "dask_p2p.tools.dropin",
    "Link": "dask_p2p.tools.report",
    "LocalPoints": "dask_p2p.sections.context.points",
    "MemoryEstimate": "dask_p2p.ops.estimate",
    "PartsEstimate": "dask_p2p.ops.estimate",
    "Pending": "dask_p2p.sections.exchange.halo",
    "Problem": "dask_p2p.tools.report",
    "RankReport": "dask_p2p.tools.stalls",
    "Report": "dask_p2p.tools.report",
    "ResidentGang": "dask_p2p.fusing.resident.client",
    "Run": "dask_p2p.monitoring.runs",
    "RunTable": "dask_p2p.monitoring.runs",
    "SectionEstimate": "dask_p2p.sections.api.estimate",
    "State": "dask_p2p.sections.context.state",
    "Status": "dask_p2p.tools.report",
    "TaskRecord": "dask_p2p.monitoring.records",
    "Transfer": "dask_p2p.sections.context.transfers",
    "TransformEstimate": "dask_p2p.ops.fft.estimate",
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_CLASSES]


class AsynchronousClient(Protocol):
    """A `distributed.Client` with ``asynchronous=True``; its results are awaited.

    Its class is the same as that of other clients. For type checkers use `typing.cast`.
    """

    @property
    def asynchronous(self) -> Literal[True]:
        """True for an asynchronous client."""


#: A block or a part of one, of NumPy, CuPy or another library with a backend.
Array: TypeAlias = Any
DaskArray: TypeAlias = "dask.array.Array"
#: The dtype class of NumPy and CuPy.
DType: TypeAlias = "np.dtype[Any]"
#: Name of an array's backend: "numpy", "cupy".
Kind: TypeAlias = str
#: Key of a Dask task: a name, or a name and a block index.
Key: TypeAlias = str | tuple[Any, ...]

# Sizes along one axis; None leaves the axis unchanged.
_Sizes: TypeAlias = float | SupportsIndex | str | Sequence[int] | None
#: Chunks as in `dask.array.rechunk`: one size for all axes, a sequence, or a mapping by axis.
ChunksLike: TypeAlias = _Sizes | Sequence[_Sizes] | Mapping[int, _Sizes]

_Width: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None  # of one axis
_Depth: TypeAlias = _Width | Sequence[_Width] | Mapping[int, _Width]  # of one array
#: Halo widths for all axes, in a sequence or by axis; or a list of these, one for each array.
DepthLike: TypeAlias = _Depth | list[_Depth]

_Boundary: TypeAlias = str | SupportsFloat | SupportsComplex | Callable[..., None] | None
_Boundaries: TypeAlias = _Boundary | Sequence[_Boundary] | Mapping[int, _Boundary]
#: Boundary conditions at the ends of an array, in the forms of `DepthLike`.
BoundaryLike: TypeAlias = _Boundaries | list[_Boundaries]
