"""Turbulence in two dimensions: spmd, Fourier transforms in steps."""

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from dask_p2p import LocalBlock, Same

VISCOSITY, DT = 1e-4, 2e-3


def advection(w, to_points, to_waves, k, n):
    """Return the rate of change of the vorticity's coefficients `w`."""
    ky, kx = k
    squares = kx**2 + ky**2
    psi = w / np.where(squares == 0, 1, squares)
    u, v = to_points(1j * ky * psi), to_points(-1j * kx * psi)
    carried = u * to_points(1j * kx * w) + v * to_points(1j * ky * w)
    is_kept = (abs(kx) < n / 3) & (abs(ky) < n / 3)  # without aliases
    return -to_waves(carried) * is_kept - VISCOSITY * squares * w


def advanced(w, *wavenumbers):
    """Return the coefficients after a step of Runge and Kutta."""
    a = w + DT * advection(w, *wavenumbers)
    b = 0.75 * w + 0.25 * (a + DT * advection(a, *wavenumbers))
    return w / 3 + 2 / 3 * (b + DT * advection(b, *wavenumbers))


def solve(ctx, w, n, steps):
    waves = (1,)  # the divided axis of coefficients

    def to_waves(a):
        return ctx.rfftn(a, partition=waves)

    def to_points(a):
        return ctx.irfftn(a, from_partition=waves)

    k = ctx.wavenumbers(2 * np.pi / n, partition=waves, real=True)
    s = ctx.state(w=to_waves(w), enstrophy=np.zeros(steps))
    for step in ctx.steps(steps, s):
        s.w = advanced(s.w, to_points, to_waves, k, n)
        squares = (to_points(s.w) ** 2).sum()
        s.enstrophy[step] = ctx.allreduce(squares) / n**2
    return {"w": to_points(s.w), "enstrophy": s.enstrophy}


def start(n):
    """Return random vorticity of large eddies."""
    noise = np.random.default_rng(0).normal(size=(n, n))
    k = np.hypot(
        np.fft.fftfreq(n, 1 / n)[:, None], np.fft.rfftfreq(n, 1 / n)
    )
    w = np.fft.irfft2(np.fft.rfft2(noise) * k * np.exp(-((k / 8) ** 2)))
    return 5 * w / w.std()


def main(n=32, steps=10, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    w = start(n)
    lazy = dask_p2p.spmd(
        solve,
        da.from_array(w, chunks=(n // 8, n)),
        partition=(0,),
        outputs={"w": LocalBlock(), "enstrophy": Same(np.zeros(steps))},
        n=n,
        steps=steps,
    )
    (result,) = dask.compute(lazy)
    if compare:  # with the same in NumPy
        k = np.fft.fftfreq(n, 1 / n)[:, None], np.fft.rfftfreq(n, 1 / n)
        coefficients, enstrophy = np.fft.rfft2(w), []
        for _ in range(steps):
            coefficients = advanced(
                coefficients, np.fft.irfft2, np.fft.rfft2, k, n
            )
            enstrophy.append((np.fft.irfft2(coefficients) ** 2).mean())
        expected = np.fft.irfft2(coefficients)
        np.testing.assert_allclose(result["w"], expected, atol=1e-10)
        np.testing.assert_allclose(
            result["enstrophy"], enstrophy, rtol=1e-10
        )
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
