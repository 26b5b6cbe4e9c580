"""The program of a rank: all that it computes, sends and receives, superstep by superstep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from dask_p2p.geometry import Index
from dask_p2p.plans import Plan
from dask_p2p.types import DType, Key, Kind
from dask_p2p.versioned import versioned


class AssembledBlock(NamedTuple):
    """A block that one rank assembles from regions of blocks, perhaps of other ranks."""

    key: Key
    plan: Plan  # assembly of the whole array
    position: Index  # index of the block
    dtype: DType | None  # of the sources, and of the assembled block; None: any
    epilogue: Callable[[Any, Index], Any] | None  # see `OutputSpec.epilogue`


class AssembleStep(NamedTuple):
    """The assembly of a block by its owner."""

    block: AssembledBlock
    local: tuple[tuple[int, Key], ...]  # sources of the same rank: position in the plan, and key

    @property
    def key(self) -> Key:
        """The key of the block."""
        return self.block.key


class WholeValue(NamedTuple):
    """A message's item: a whole value, for tasks of another rank."""

    key: Key

    @property
    def received_key(self) -> Key:
        """The key of the value that its receiver gets or begins."""
        return self.key


class Regions(NamedTuple):
    """A message's item: all regions of a value that an assembled block of another rank needs."""

    key: Key  # of the source
    number: int  # position of the source in the block's plan
    block: AssembledBlock

    @property
    def received_key(self) -> Key:
        """The key of the value that its receiver gets or begins."""
        return self.block.key


Item: TypeAlias = WholeValue | Regions
#: Items by the rank at the other end. Both ends list the same items in the same order.
Items: TypeAlias = dict[int, list[Item]]


@dataclass
class Superstep:
    """One exchange with other ranks, and then the tasks that need nothing later of them."""

    sends: Items = field(default_factory=dict)
    receives: Items = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)  # Dask's tasks and `AssembleStep`, in order


class CallValue(NamedTuple):
    """A literal that comes with each call of a compiled function: a number, or a small array."""

    number: int  # of the argument
    kind: Kind  # of the array that functions get


@versioned(strict=True)
@dataclass(frozen=True)
class Program:
    """The program of one rank.

    A value has as many *uses* as local tasks and items of messages read it, and one more as an
    output. The rank drops it after its last use.
    """

    inputs: tuple[Key, ...]  # keys of the blocks that Dask passes to the rank
    literals: dict[Key, Any]  # values that the graph contains, or `CallValue` in their place
    supersteps: tuple[Superstep, ...]
    uses: Mapping[Key, int]
    outputs: tuple[tuple[Key, ...], ...]  # by array: keys of the rank's output blocks
    reads_memory: bool  # whether ranks read large values in each other's memory, if they can
    declared_bytes: int = 0  # most bytes of its values at the same time, as far as declared

    @property
    def call_values(self) -> dict[Key, CallValue]:
        """The literals that come with each call."""
        literals = self.literals.items()
        return {key: literal for key, literal in literals if isinstance(literal, CallValue)}
