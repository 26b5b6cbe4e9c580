"""What belongs to an array in a group that xarray wrote: the group, and its coordinates."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask_p2p.files.zarr_metadata import Metadata, read_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["copy_group", "is_consolidated"]

_COORDINATES = "coordinates"  # attribute that names them, of arrays and of groups


def copy_group(array: Path, target: Path) -> str:
    """Copy the group around an array, its attributes and the array's coordinates, to a new folder.

    Parameters
    ----------
    array : Path
        Folder of the array.
    target : Path
        Folder that is there, and empty.

    Returns
    -------
    str
        Name that the array has in the group. Empty if it is in none, or its axes have no names, as
        xarray's have; nothing is copied then.
    """
    dimensions = read_metadata(array).dimensions
    try:
        group = read_metadata(array.parent)
    except FileNotFoundError:
        return ""
    if not dimensions:
        return ""
    for name in _coordinates(array, group, set(dimensions)):
        shutil.copytree(array.parent / name, target / name)
    _without_consolidated(group).write(target)
    return array.name


def is_consolidated(group: Path) -> bool:
    """Tell whether a group's metadata hold those of its arrays too."""
    consolidated = read_metadata(group).files.get("zarr.json", {}).get("consolidated_metadata")
    return bool(consolidated) or (group / ".zmetadata").exists()


def _without_consolidated(group: Metadata) -> Metadata:
    """Leave out the copies of arrays' metadata: the array's own ones change."""
    files: dict[str, Any] = {
        file: {name: value for name, value in content.items() if name != "consolidated_metadata"}
        for file, content in group.files.items()
    }
    return Metadata(files)


def _coordinates(array: Path, group: Metadata, dimensions: set[str]) -> Iterator[str]:
    """Yield the names of arrays that say where this one's elements lie."""
    named = [read_metadata(array).attributes, group.attributes]
    texts = [attributes.get(_COORDINATES) for attributes in named]
    names = dimensions.union(*(text.split() for text in texts if isinstance(text, str)))
    for name in sorted(names - {array.name}):
        try:
            along = read_metadata(array.parent / name).dimensions
        except FileNotFoundError:
            continue  # an axis need not have a coordinate
        if dimensions.issuperset(along):
            yield name
