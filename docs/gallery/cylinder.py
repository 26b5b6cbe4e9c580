"""Flow past a cylinder: a lattice, a mask, inflow by position."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p

EX = np.array([0, 1, 0, -1, 0, 1, -1, -1, 1])
EY = np.array([0, 0, 1, 0, -1, 1, 1, -1, -1])
WEIGHTS = np.array([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)[:, None, None]
BACK = [0, 3, 4, 1, 2, 7, 8, 5, 6]
OMEGA, SPEED = 1.9, 0.1


def equilibrium(rho, ux, uy):
    eu = EX[:, None, None] * ux + EY[:, None, None] * uy
    squares = ux**2 + uy**2
    return WEIGHTS * rho * (1 + 3 * eu + 4.5 * eu**2 - 1.5 * squares)


def velocity(f):
    rho = f.sum(axis=0)
    along_x = f[1] + f[5] + f[8] - f[3] - f[6] - f[7]
    along_y = f[2] + f[5] + f[6] - f[4] - f[7] - f[8]
    return rho, along_x / rho, along_y / rho


FREE = equilibrium(
    np.ones((1, 1)), np.full((1, 1), SPEED), np.zeros((1, 1))
)


def moved(f, solid, column, columns):
    """Return the populations after a step, from `f` with a halo."""
    ny, nx = f.shape[1] - 2, f.shape[2] - 2
    new = np.empty((9, ny, nx))
    for k in range(9):
        rows = slice(1 - EY[k], 1 - EY[k] + ny)
        new[k] = f[k, rows, 1 - EX[k] : 1 - EX[k] + nx]
    new = np.where(column == 0, FREE, new)
    new = np.where(column == columns - 1, f[:, 1:-1, :-2], new)
    collided = new + OMEGA * (equilibrium(*velocity(new)) - new)
    return np.where(solid, new[BACK], collided)


def flow(f, solid, at):
    return {"f": moved(f, solid, at.index[2], at.shape[2])}


def cylinder(ny, nx):
    y, x = np.ogrid[:ny, :nx]
    return (x - nx // 5) ** 2 + (y - ny // 2 + 1) ** 2 < (ny / 9) ** 2


def start(ny, nx):
    """Return a flow with a wave, so that eddies begin soon."""
    ones = np.ones((ny, nx))
    wave = 0.3 * SPEED * np.sin(4 * np.pi * np.arange(nx) / nx)
    return equilibrium(ones, SPEED * ones, wave * ones)


def main(ny=24, nx=40, steps=30, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    solid, f = cylinder(ny, nx), start(ny, nx)
    lazy = dask_p2p.iterate(
        flow,
        {"f": da.from_array(f, chunks=(9, ny // 2, nx // 4))},
        depth={1: 1, 2: 1},
        steps=steps,
        boundary="periodic",
        constants={"solid": solid},
    )
    result = lazy["f"].compute()
    if compare:  # with the same in NumPy
        for _ in range(steps):
            halo = np.pad(f, ((0, 0), (1, 1), (1, 1)), "wrap")
            f = moved(halo, solid, np.arange(nx), nx)
        assert np.array_equal(result, f)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
