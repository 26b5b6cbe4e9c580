"""Zarr's metadata as both specifications lay them down: JSON beside the chunks.

An array that is transposed keeps what its input has (format version, codecs, fill value,
attributes): its metadata are the input's with another shape, other chunks, and the names of axes
in another order. What is not known here stays as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Metadata", "read_metadata"]

_DIMENSIONS = "_ARRAY_DIMENSIONS"  # where xarray keeps the names of a version 2 array's axes
_SHARDING = "sharding_indexed"
# Lists of which each item is of one axis.
_IN_ATTRIBUTES = {_DIMENSIONS}
_IN_ARRAY = {"shape", "chunks", "chunk_shape", "dimension_names"}


@dataclass(frozen=True)
class Metadata:
    """What the files of an array or a group say.

    Parameters
    ----------
    files : dict
        Names of JSON files to what they hold: zarr.json of version 3, or .zarray or .zgroup, and
        .zattrs, of version 2.
    """

    files: dict[str, Any]

    @property
    def version(self) -> int:
        """Zarr's format version."""
        return 3 if "zarr.json" in self.files else 2

    @property
    def attributes(self) -> dict[str, Any]:
        """What users and other libraries say of it."""
        inside: dict[str, Any] = self.files.get("zarr.json", {}).get("attributes", {})
        return inside or dict(self.files.get(".zattrs", {}))

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the axes, as far as they have some."""
        names = self.files.get("zarr.json", {}).get("dimension_names")
        return tuple(filter(None, names or self.attributes.get(_DIMENSIONS, ())))

    def write(self, folder: Path) -> None:
        """Write the files into a folder that is there."""
        for name, text in self.texts().items():
            (folder / name).write_text(text, "utf-8")

    def texts(self) -> dict[str, str]:
        """Content of each file."""
        return {name: json.dumps(content, indent=2) for name, content in self.files.items()}

    def reshaped(self, shape: Sequence[int], chunks: Sequence[int]) -> Metadata:
        """Metadata of an array of another shape, in chunks without shards."""
        if self.version == 2:
            return self._with(".zarray", shape=shape, chunks=chunks)
        codecs = self.files["zarr.json"]["codecs"]
        if codecs[0]["name"] == _SHARDING:
            codecs = codecs[0]["configuration"]["codecs"]
        return self._with("zarr.json", shape=shape, chunk_grid=_grid(chunks), codecs=codecs)

    def transposed(self, axes: Sequence[int]) -> Metadata:
        """Metadata of the transposed array, in the same chunks, and shards if there are any."""
        return Metadata(
            {
                name: _permuted(content, axes, _IN_ATTRIBUTES if name == ".zattrs" else _IN_ARRAY)
                for name, content in self.files.items()
            }
        )

    def _with(self, name: str, **changes: Any) -> Metadata:
        return replace(self, files=self.files | {name: self.files[name] | changes})


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of an array or a group; of version 3 if there are both."""
    for names in (("zarr.json",), (".zarray", ".zgroup", ".zattrs")):
        found = [folder / name for name in names if (folder / name).exists()]
        if found:
            return Metadata({path.name: json.loads(path.read_text("utf-8")) for path in found})
    raise FileNotFoundError(f"there is no Zarr array or group in {folder}")


def _grid(chunks: Sequence[int]) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunks)}}


def _permuted(content: Any, axes: Sequence[int], names: set[str]) -> Any:
    """Reorder each list under one of these names, however deep it lies."""
    if isinstance(content, list):
        return [_permuted(item, axes, names) for item in content]
    if not isinstance(content, dict):
        return content
    made = {}
    for name, value in content.items():
        if name in names and isinstance(value, list) and len(value) == len(axes):
            made[name] = [value[axis] for axis in axes]
        else:
            inside = _IN_ATTRIBUTES if name == "attributes" else names
            made[name] = _permuted(value, axes, inside)
    return made
