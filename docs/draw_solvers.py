"""Computes and draws the pictures of solvers: ``PYTHONPATH=. python docs/draw_solvers.py``."""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
from distributed import Client

import dask_p2p

PAGE = Path(__file__).parent / "how-to" / "coupled-fields.md"
IMAGES = Path(__file__).parent / "images"
POINTS, STEPS = 256, 12_000


def main() -> None:
    """Draw the pattern of Gray and Scott."""
    from matplotlib import pyplot

    program = PAGE.read_text().split("```python\n")[1].split("```")[0]
    functions: dict[str, object] = {}
    exec(program.split("\n\nu, v = start")[0], functions)
    u, v = functions["start"](POINTS)  # type: ignore[operator]
    with Client(dask_p2p.local_cluster(2)) as client:
        chunks = (POINTS // 2, -1)
        fields = {
            "u": da.from_array(u, chunks=chunks),
            "v": da.from_array(v, chunks=chunks),
        }
        made = dask_p2p.iterate(
            functions["react"], fields, 1, STEPS, feed=0.055, kill=0.062
        )
        (result,) = dask.compute(made)
        client.close()
    IMAGES.mkdir(exist_ok=True)
    pyplot.imsave(IMAGES / "gray-scott.png", result["v"], cmap="viridis")


if __name__ == "__main__":
    main()
