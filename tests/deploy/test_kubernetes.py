"""deploy/kubernetes: held against the operator's schema; the CPU cluster's commands run by TLS."""

import base64
import json
import re
import shutil
from pathlib import Path

import jsonschema
import pytest
import yaml
from dask.utils import parse_bytes
from distributed import Security

from dask_p2p.tools.cluster import POOL_GRANULE_BYTES
from tests.deploy.support import BIN, DEPLOY, free_ports, output_of, running, transpose_on

KUBERNETES = DEPLOY / "kubernetes"
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "daskcluster.json").read_text())


def documents(name):
    return {
        document["kind"]: document
        for document in yaml.safe_load_all((KUBERNETES / name).read_text())
    }


def closed(schema):
    """The schema, where names that it does not know are errors, as they are for kubectl."""
    if isinstance(schema, list):
        return [closed(subschema) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        result.setdefault("additionalProperties", False)
    return result


SPEC = jsonschema.Draft202012Validator(closed(SCHEMA["properties"]["spec"]))


def container(cluster, component):
    (container_spec,) = cluster["spec"][component]["spec"]["containers"]
    return container_spec


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_clusters_are_what_the_operator_takes(name):
    cluster = documents(f"{name}.yaml")["DaskCluster"]
    assert cluster["apiVersion"] == "kubernetes.dask.org/v1"
    SPEC.validate(cluster["spec"])
    container(cluster, "worker")["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        SPEC.validate(cluster["spec"])


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_what_is_named_is_there(name):
    manifests = documents(f"{name}.yaml")
    cluster, config = manifests["DaskCluster"], manifests["ConfigMap"]
    for component in ("scheduler", "worker"):
        pod = cluster["spec"][component]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = container(cluster, component)["volumeMounts"]
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    service = cluster["spec"]["scheduler"]["service"]
    ports = {port["name"] for port in container(cluster, "scheduler")["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == ports
    assert service["selector"]["dask.org/cluster-name"] == cluster["metadata"]["name"]
    address = f"tls://{cluster['metadata']['name']}-scheduler:8786"
    variables = {
        variable["name"]: variable["value"] for variable in container(cluster, "worker")["env"]
    }
    assert variables.get("DASK_SCHEDULER_ADDRESS", address) == address


def test_prometheus_scrapes_what_pods_serve():
    monitor = documents("monitor.yaml")["PodMonitor"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (expression,) = monitor["selector"]["matchExpressions"]
    assert expression["key"] == "dask.org/component"
    assert expression["values"] == ["scheduler", "worker"]
    for name in ("cpu", "gpu"):
        cluster = documents(f"{name}.yaml")["DaskCluster"]
        for component in expression["values"]:
            ports = {port["name"]: port for port in container(cluster, component)["ports"]}
            assert endpoint["port"] in ports


@pytest.mark.long  # other tests have encrypted clusters; the manifest is checked above
@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_the_cpu_clusters_commands_make_an_encrypted_cluster(tmp_path):
    secret = yaml.safe_load(output_of(KUBERNETES / "certificates.sh"))
    manifests = documents("cpu.yaml")
    cluster, config = manifests["DaskCluster"], manifests["ConfigMap"]
    pods = [cluster["spec"][component]["spec"] for component in ("scheduler", "worker")]
    volumes = [volume for pod in pods for volume in pod["volumes"]]
    secrets = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert secrets == {secret["metadata"]["name"]}
    for name, value in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(value))
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text.replace("/etc/dask-tls", str(tmp_path)))

    port, dashboard = map(str, free_ports(2))
    outside = {"8786": port, ":8788": ":0", "$(DASK_WORKER_NAME)": "pod", "/scratch": str(tmp_path)}
    outside["4"] = "2"  # workers
    scheduler, worker = (
        [outside.get(word, word) for word in container(cluster, component)["args"]]
        for component in ("scheduler", "worker")
    )
    assert scheduler[0] == worker[0] == "dask"
    scheduler += ["--dashboard-address", f":{dashboard}"]
    address = f"tls://127.0.0.1:{port}"
    security = Security(
        tls_ca_file=str(tmp_path / "ca.crt"),
        tls_client_cert=str(tmp_path / "tls.crt"),
        tls_client_key=str(tmp_path / "tls.key"),
        require_encryption=True,
    )
    with running(
        tmp_path,
        [BIN / scheduler[0], *scheduler[1:]],
        [BIN / worker[0], *worker[1:]],
        DASK_CONFIG=str(tmp_path),
        DASK_SCHEDULER_ADDRESS=address,
    ):
        transpose_on(address, 2, security=security)


OPTIONS = (Path(__file__).parent / "schemas" / "dask-cuda-worker.txt").read_text().split()
TEXTS = {
    path: path.read_text()
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.suffix not in {".lock", ".json", ".svg", ".png", ".pyc"}
}


def test_options_of_dask_cuda_are_those_that_it_has():
    """In the commands of its workers, wherever they are written."""
    folders = set()
    for path, text in TEXTS.items():
        joined = re.sub(r"\\\n\s*|\n\s*- ", " ", text)
        for line in re.findall(r"dask cuda worker(.*)|worker_extra_args=(.*)", joined):
            options = re.findall(r"--[a-z][a-z-]+", "".join(line))
            assert set(options) <= set(OPTIONS), path
            folders |= {path.parent} if options else set()
    assert len(folders) >= 4


def test_pools_are_quick_to_map():
    sizes = {
        size
        for text in TEXTS.values()
        for size in re.findall(
            r"(?i)pool[_-]?size[^\d\n]{0,20}\n?[^\d\n]{0,12}(\d+ ?[KMGT]i?B)", text
        )
        + re.findall(r"POOL\W{1,3}(\d+ ?[KMGT]i?B)", text)
    }
    assert sizes
    assert all(parse_bytes(size) % POOL_GRANULE_BYTES == 0 for size in sizes)
