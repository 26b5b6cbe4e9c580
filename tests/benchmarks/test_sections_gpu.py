"""What of the program needs no GPU. On GPUs it compares values itself before it times anything."""

from __future__ import annotations

import pytest

from benchmarks import sections_calls, sections_gpu
from dask_p2p.plans.orders import ORDERS
from tests.benchmarks.support import results_of

pytestmark = pytest.mark.programs


def jax_says(said):
    """Return a stand-in for JAX's programs, and a list of what they are asked."""
    asked = []

    def run(module, *arguments, timeout_s):
        asked.append([module, *map(str, arguments)])
        if module == "jax_wave":
            raise RuntimeError("no memory")
        return said

    return run, asked


def test_what_is_compared_and_written(tmp_path, monkeypatch):
    run, asked = jax_says({"times_s": [0.5]})
    monkeypatch.setattr(sections_gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(sections_gpu, "run_program", run)
    options = "--cpu --size 12 --steps 3 --side 51 --cube 8 --shape 8 6 4 --repeats 1"
    made, output = results_of(sections_gpu, tmp_path, options)
    wave, square, cube, other = made["rows"]
    named = wave["size"], square["side"], cube["cube"], other["shape"]
    assert named == (12, 51, 8, "8x6x4")
    ways = {
        sections_gpu.KERNEL, sections_gpu.OURS, sections_gpu.NO_OVERLAP, sections_gpu.CAPTURED
    }  # fmt: skip
    assert wave["step_s"].keys() == ways
    by_jax = [f"{sections_gpu.JAX}, for {way}" for way in ("Context.fftn", "Context.rfftn")]
    transposes, transforms = square["transpose_s"], cube["transform_s"]
    in_section = {way for way in transposes if way.startswith(sections_calls.IN_SECTION)}
    assert len(in_section) == len(ORDERS)
    assert transposes.keys() - in_section == {sections_calls.LAYER, "JAX"}
    in_slabs = {"Context.fftn", "Context.rfftn", *by_jax}
    assert transforms.keys() == other["transform_s"].keys() == in_slabs
    measured = [*transposes.values(), *transforms.values(), *other["transform_s"].values()]
    assert all(len(each) == 1 and each[0] > 0 for each in measured)
    common = ["--gpus", "2", "--repeats", "1", "--cpu"]
    assert asked == [
        ["jax_wave", "--size", "12", "--steps", "3", *common],
        ["sharded_jax", "--size", "51", *common],
        ["jax_fft", "--shape", "8", "8", "8", *common],
        ["jax_fft", "--shape", "8", "8", "8", "--real", *common],
        ["jax_fft", "--shape", "8", "6", "4", *common],
        ["jax_fft", "--shape", "8", "6", "4", "--real", *common],
    ]
    assert "12 JAX shard_map failed: RuntimeError: no memory" in output
