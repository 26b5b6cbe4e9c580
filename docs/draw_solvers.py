"""Computes and draws the pictures of solvers: ``PYTHONPATH=. python docs/draw_solvers.py``.

Arguments are names of pictures, by default all. The programs are those of the pages, on more points
and for more steps.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dask_p2p

PAGES = Path(__file__).parent / "how-to"
IMAGES = Path(__file__).parent / "images"
TWIN = "\n# The same in NumPy:"


def computed(page: str, number: int, **values: int) -> dict[str, Any]:
    """Run a program of a page with other values of some numbers; return its names."""
    program = (
        (PAGES / page).read_text().split("```python\n")[number].split("```")[0]
    )
    program = program.split(TWIN)[0]
    before = re.search(
        r"^(\w+(?:, \w+)*) = (\d+(?:, \d+)*)$", program, re.MULTILINE
    )
    assert before is not None
    values_of_names = [str(values[name]) for name in before[1].split(", ")]
    program = program.replace(
        before[0], f"{before[1]} = {', '.join(values_of_names)}", 1
    )
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def gray_scott() -> Any:
    """Return a pattern of Gray and Scott."""
    program = (PAGES / "coupled-fields.md").read_text().split("```python\n")[1]
    names: dict[str, Any] = {}
    exec(program.split("\n\nu, v = start")[0], names)
    u, v = names["start"](256)
    array = names["da"].from_array
    fields = {"u": array(u, chunks=(128, -1)), "v": array(v, chunks=(128, -1))}
    return dask_p2p.iterate(
        names["react"], fields, 1, 12_000, feed=0.055, kill=0.062
    )["v"].compute()


def shallow_water() -> Any:
    """Return the vorticity of a jet."""
    names = computed("simulations.md", 1, ny=128, nx=256, steps=9_000)
    _, u, v = names["result"]
    return np.gradient(v, axis=1) - np.gradient(u, axis=0)


def cylinder() -> Any:
    """Return the vorticity behind a cylinder."""
    names = computed("simulations.md", 2, ny=80, nx=240, steps=10_000)
    _, ux, uy = names["velocity"](names["result"])
    vorticity = np.gradient(uy, axis=1) - np.gradient(ux, axis=0)
    return np.where(names["solid"], 0, vorticity).clip(-0.02, 0.02)


def elastic() -> Any:
    """Return the velocity along axis 1 of elastic waves."""
    vx = computed("simulations.md", 3, n=200, steps=800)["result"]["vx"]
    limit = abs(vx).max() / 2
    return vx.clip(-limit, limit)


def turbulence() -> Any:
    """Return the vorticity of a periodic flow."""
    return computed("simulations.md", 4, n=192, steps=1_000)["result"]["w"]


def tracer() -> Any:
    """Return a tracer in a stream."""
    return computed("simulations.md", 5, ny=80, nx=240, steps=1_500)["result"]


def lanczos() -> Any:
    """Draw the eigenvalues of the small matrix by the number of steps."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    for count in range(2, 61, 2):
        values = computed("simulations.md", 6, n=96, count=count)["result"]
        axes.plot([count] * count, values, "_", color="tab:blue", markersize=4)
    axes.set(xlabel="steps", ylabel="eigenvalues of the small matrix")
    figure.savefig(IMAGES / "lanczos.png", dpi=100)


def seismic() -> Any:
    """Return the pressure of a shot above a boundary between rocks."""
    namespace = computed("simulations.md", 7, ny=200, nx=300, steps=500)
    pressure = namespace["result"]["p"][0][::-1]
    limit = abs(pressure).max() / 2
    return pressure.clip(-limit, limit)


def spins() -> Any:
    """Return spins after a quench."""
    return computed("simulations.md", 8, n=256, steps=200)["result"]["s"]


def multigrid() -> Any:
    """Return the potential of charges."""
    u = computed("simulations.md", 9, n=256, cycles=10)["result"]["u"]
    limit = np.percentile(abs(u), 99)
    return u.clip(-limit, limit)


def particles() -> Any:
    """Return the logarithm of the density of particles."""
    names = computed("simulations.md", 10, count=1_000_000, steps=12)
    _, x, y = names["result"]["particles"].T
    return np.log1p(np.histogram2d(x, y, 320, [(0, 1), (0, 1)])[0])


def life() -> Any:
    """Return the cells after many steps, enlarged."""
    cells = computed("simulations.md", 11, n=160, steps=500)["result"]["cells"]
    return cells.repeat(2, 0).repeat(2, 1)


#: By name of a picture: the function that computes it, and its colours.
PICTURES: dict[str, tuple[Callable[[], Any], str]] = {
    "gray-scott": (gray_scott, "viridis"),
    "shallow-water": (shallow_water, "RdBu_r"),
    "cylinder": (cylinder, "RdBu_r"),
    "elastic": (elastic, "RdBu_r"),
    "turbulence": (turbulence, "RdBu_r"),
    "tracer": (tracer, "viridis"),
    "lanczos": (lanczos, ""),
    "seismic": (seismic, "RdBu_r"),
    "spins": (spins, "cividis"),
    "multigrid": (multigrid, "RdBu_r"),
    "particles": (particles, "magma"),
    "life": (life, "binary"),
}


def main() -> None:
    """Draw the pictures with these names."""
    from matplotlib import pyplot

    IMAGES.mkdir(exist_ok=True)
    with Client(dask_p2p.local_cluster(2)) as client:
        for name in sys.argv[1:] or PICTURES:
            function, colours = PICTURES[name]
            picture = function()
            if picture is not None:
                path = IMAGES / f"{name}.png"
                pyplot.imsave(path, picture, cmap=colours, origin="lower")
        client.close()


if __name__ == "__main__":
    main()
