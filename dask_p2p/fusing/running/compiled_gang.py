"""The gang of a compiled function, for arguments of any names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask.base import tokenize

from dask_p2p.config import Options
from dask_p2p.fusing.planning.declared import Declared
from dask_p2p.fusing.planning.tasks import name_of
from dask_p2p.fusing.running.gang import FusedGang, RankProgram, gang_of, output_prefix
from dask_p2p.geometry import Chunks
from dask_p2p.types import Array, Key


@dataclass(frozen=True)
class CompiledGang:
    """The programs of a compiled function, without the names of the arguments of a call."""

    token: str
    ranks: Sequence[RankProgram]
    options: Options
    arguments: tuple[str, ...]  # names of the arrays that stand for arguments
    kept: Mapping[Key, Any]  # tasks that stay with Dask, and are the same in all calls

    def of_call(self, names: Sequence[str]) -> FusedGang:
        """Return the gang that reads arrays with these names."""
        token = tokenize(self.token, list(names))
        return gang_of(token, self.ranks, self.options, self.renamed(names))

    def renamed(self, names: Sequence[str]) -> Callable[[Key], Key]:
        """Return the function that returns the keys of inputs in a call."""
        of = dict(zip(self.arguments, names, strict=True))
        return lambda key: (of[key[0]], *key[1:]) if name_of(key) in of else key


@dataclass(frozen=True)
class CompiledLayer:
    """The tasks of one of the results of a call, where arrays are expressions.

    The results of one call share the tasks of its ranks.
    """

    gang: CompiledGang
    number: int  # of the result
    declared: Declared

    @property
    def chunks(self) -> Chunks:
        """Chunks of the result."""
        return self.declared.chunks

    @property
    def token(self) -> str:
        """Token that identifies the result, without its inputs."""
        return f"{self.number}-{self.gang.token}"

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.token

    def meta(self, first: Any) -> Array:
        """Return an empty array like the blocks."""
        made: Array = self.declared.meta
        return made

    def name(self, token: str) -> str:
        """Return the name of the result."""
        return f"{output_prefix(self.number)}-{token}"

    def tasks(self, name: str, inputs: Sequence[Any]) -> dict[Key, Any]:
        """Return the tasks of the gang, those that stay with Dask, and the output tasks."""
        gang = self.gang.of_call([x.name for x in inputs])
        return {**self.gang.kept, **gang.tasks, **gang.outputs(self.number, name)}
