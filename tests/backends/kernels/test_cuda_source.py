"""transpose.cu compiles for every GPU that CuPy 14 runs on, and holds what the plans ask for."""

import re
import shutil

import pytest

from dask_p2p.backends.kernels import launch
from dask_p2p.backends.kernels.launch import ENTRIES, WORD_SIZES_BYTES
from tests.backends.emulator import SOURCE
from tests.support import run_command

pytestmark = pytest.mark.programs

NVCC = shutil.which("nvcc")
STATIC_SHARED_LIMIT_BYTES = 48 << 10
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def architectures():
    """Return those of interest that this nvcc knows."""
    process = run_command(NVCC, "--list-gpu-arch")
    return {"75", "80", "86", "89", "90", "100"} & set(
        re.findall(r"compute_(\d+)$", process.stdout, re.MULTILINE)
    )


def nvcc(tmp_path, *options):
    command = [NVCC, "-std=c++17", "-Werror", "all-warnings", *options, str(SOURCE)]
    return run_command(*command, "-o", tmp_path / "out")


@needs_nvcc
@pytest.mark.parametrize(
    "arch",
    ["75", *(pytest.param(a, marks=pytest.mark.long) for a in ("80", "86", "89")), "90", "100"],
)
def test_every_entry_compiles(tmp_path, arch):
    if arch not in architectures():
        pytest.skip(f"this nvcc does not compile for {arch}")
    process = nvcc(tmp_path, "-ptx", f"-arch=compute_{arch}")
    assert process.returncode == 0, process.stderr
    ptx = (tmp_path / "out").read_text()
    assert set(re.findall(r"\.entry (\w+)\(", ptx)) == set(ENTRIES)
    assert ".local" not in ptx  # no array is indexed in a way that puts it on the stack
    for word in WORD_SIZES_BYTES:
        body = re.search(rf"\.entry permute_vector_{word}\(.*?^}}", ptx, re.DOTALL | re.MULTILINE)
        for access in ("ld.global", "st.global", "ld.shared", "st.shared"):
            assert re.search(rf"{access}(\.nc)?\.v4\.(u|b)32", body[0]), (word, access)


@needs_nvcc
@pytest.mark.parametrize("word_bytes", WORD_SIZES_BYTES)
def test_a_word_size_compiles_alone(tmp_path, word_bytes):
    process = nvcc(tmp_path, "-ptx", "-arch=compute_90", f"-DONLY_WORD_BYTES={word_bytes}")
    assert process.returncode == 0, process.stderr
    entries = set(re.findall(r"\.entry (\w+)\(", (tmp_path / "out").read_text()))
    assert entries == {entry for entry in ENTRIES if entry.endswith(f"_{word_bytes}")}


@needs_nvcc
@pytest.mark.parametrize("arch", [pytest.param("80", marks=pytest.mark.long), "90"])
def test_registers_and_shared_memory_suffice(tmp_path, arch):
    if arch not in architectures():
        pytest.skip(f"this nvcc does not compile for {arch}")
    process = nvcc(tmp_path, "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v")
    assert process.returncode == 0, process.stderr
    spills = SPILL.findall(process.stderr)
    assert len(spills) == len(ENTRIES)
    assert set(spills) == {("0", "0")}
    assert all(
        int(size) <= STATIC_SHARED_LIMIT_BYTES
        for size in re.findall(r"(\d+) bytes smem", process.stderr)
    )


def test_numbers_are_the_same_in_python_and_cuda():
    source = SOURCE.read_text()
    sizes = re.findall(r"^ENTRIES\((\d+), \w+, (\d+), (\d+), \d+\)", source, re.MULTILINE)
    assert [tuple(map(int, entry)) for entry in sizes] == [
        (word, launch.VECTOR_TILE[word], launch.VECTOR_THREADS[word]) for word in WORD_SIZES_BYTES
    ]
    assert f"MAX_OUTER = {launch.MAX_OUTER};" in source


def test_nothing_is_included():
    """NVRTC has no host headers."""
    assert "#include" not in SOURCE.read_text()
