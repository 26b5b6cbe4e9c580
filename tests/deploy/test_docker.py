"""deploy/docker: linted, held against the schema of compose files, and its commands run."""

import re
import sys

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.support import (
    BIN,
    DEPLOY,
    environment,
    free_ports,
    is_valid,
    running,
    transpose_on,
)
from tests.docs.pages import PROJECT, ROOT
from tests.support import run_command

pytestmark = pytest.mark.programs

DOCKER = DEPLOY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
FILES = ["compose.yaml", "compose.gpu.yaml"]


def compose(name="compose.yaml"):
    return yaml.safe_load((DOCKER / name).read_text())


@pytest.mark.parametrize("old", ["", "USER 1000"])
def test_hadolint_finds_nothing(old):
    text = DOCKERFILE.replace(old, "USER root") if old else DOCKERFILE
    process = run_command(BIN / "hadolint", "-", input=text)
    assert bool(process.stdout) == bool(old), process.stdout + process.stderr


@pytest.mark.parametrize("name", FILES)
def test_compose_files_are_valid(name, tmp_path):
    assert is_valid(DOCKER / name, "compose-spec")
    (tmp_path / name).write_text((DOCKER / name).read_text().replace("replicas", "replicants"))
    assert not is_valid(tmp_path / name, "compose-spec")


def test_what_compose_names_is_there():
    stages = set(re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, flags=re.MULTILINE))
    for name in FILES:
        for service in compose(name)["services"].values():
            build = service["build"]
            assert build["target"] in stages
            assert (DOCKER / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()
    for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, flags=re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)


def test_workers_can_read_each_others_memory():
    """They have to see each other's processes, files and shared memory."""
    services = compose()["services"]
    assert services["scheduler"]["ipc"] == "shareable"
    worker = services["worker"]
    assert worker["ipc"] == worker["pid"] == "service:scheduler"
    assert "SYS_PTRACE" in worker["cap_add"]
    (volume,) = worker["volumes"]
    for name in FILES:
        command = compose(name)["services"]["worker"]["command"]
        assert f"--local-directory {volume.partition(':')[2]}" in command


@pytest.mark.parametrize(("lock", "gpu_extras"), [("cpu", []), ("cuda13", ["cuda13"])])
def test_locks_have_all_that_is_needed(lock, gpu_extras):
    text = (DOCKER / f"{lock}.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, flags=re.MULTILINE))
    requirements = [*PROJECT["dependencies"]]
    for extra in ("dashboard", "metrics", "zarr", *gpu_extras):
        requirements += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, requirements):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version} is locked"
    assert len(re.findall(r"--hash=sha256:", text)) >= len(locked)


def test_the_commands_make_a_healthy_cluster(tmp_path):
    port, dashboard = free_ports(2)
    services = compose()["services"]
    scheduler = f"{services['scheduler']['command']} --port {port} --dashboard-address :{dashboard}"
    worker = services["worker"]["command"]
    for inside, outside in {
        "scheduler:8786": f"127.0.0.1:{port}",
        "address :8787": "address :0",
        "/scratch": str(tmp_path),
    }.items():
        assert inside in worker
        worker = worker.replace(inside, outside)

    def health(port):
        return run_command(
            sys.executable, DOCKER / "health.py", env=environment(HEALTH_PORT=str(port))
        )

    config = str(DEPLOY)  # which the image has in /etc/dask
    commands = [command.split() for command in (scheduler, worker, worker)]
    with running(tmp_path, *commands, DASK_CONFIG=config):
        transpose_on(f"tcp://127.0.0.1:{port}", 2)
        assert health(dashboard).returncode == 0
    refused = health(dashboard)
    assert refused.returncode == 1
    assert "Connection refused" in refused.stderr
