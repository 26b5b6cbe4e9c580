"""The dashboard for Grafana and the documentation name figures that there are."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from dask_p2p.monitoring import metrics as prometheus
from dask_p2p.monitoring.metrics import COUNTERS, GAUGES
from tests.docs.pages import ROOT

pytest.importorskip("prometheus_client")

DEPLOY = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))
DOCUMENT = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
NAMES = r"\bdask_p2p_\w+"


@pytest.fixture(scope="module")
def labels():
    """Labels of all figures, by the names that the pages of a worker and a scheduler have."""
    from prometheus_client import generate_latest

    class Server:
        pass

    names = {}
    for kind in ("worker", "scheduler"):
        with pytest.MonkeyPatch.context() as patch:
            server = Server()
            patch.setattr(prometheus, "_page_server", lambda kind, server=server: server)
            families = [*COUNTERS, *GAUGES]
            values = {family.name: {"x": 1} for family in families}
            patch.setitem(prometheus.registered, server, lambda values=values: values)
            page = generate_latest(prometheus.Collector(kind)).decode()
        names |= dict(re.findall(r"^(\w+)(?:{(\w+)=)?.* 1\.0$", page, re.MULTILINE))
    return names


def expressions():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_figures_that_there_are(labels):
    named = {name for text in expressions() for name in re.findall(NAMES, text)}
    assert named <= set(labels)
    of_workers = {name for name in labels if "_cluster_" not in name}
    assert of_workers <= named, "all figures of workers are shown"
    (job,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "job")
    assert set(re.findall(NAMES, job["query"]["query"])) <= set(labels)


def test_the_dashboard_asks_for_labels_that_there_are(labels):
    label_names = {"instance"}
    for text in expressions():
        (names, by) = re.findall(NAMES, text), re.findall(r"by \((\w+)\)", text)
        assert set(by) <= label_names | {labels[name] for name in names}, text
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown == set(re.findall(r"by \((\w+)\)", target["expr"]))


def test_rates_are_of_counters_and_nothing_else(labels):
    for text in expressions():
        for name in re.findall(rf"rate\(({NAMES})", text):
            assert name.endswith("_total")
        for name in re.findall(NAMES, text):
            if name.endswith("_total") and "_cluster_" not in name:
                assert f"rate({name}" in text


def test_the_documentation_lists_all_figures(labels):
    assert set(re.findall(NAMES, DOCUMENT)) == set(labels)
    rows = re.findall(rf"^\| `({NAMES})` \| `({NAMES})` \|([^|]*)\|", DOCUMENT, re.MULTILINE)
    assert len(rows) == len(COUNTERS) + len(GAUGES)
    for name, of_cluster, text in rows:
        assert of_cluster == name.replace("dask_p2p", "dask_p2p_cluster")
        assert re.findall(r"`(\w+)`", text)[:1] == ([labels[name]] if labels[name] else [])


def test_the_configuration_of_prometheus():
    configuration = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    assert set(jobs) == {"dask-scheduler", "dask-worker"}
    (files,) = jobs["dask-worker"]["file_sd_configs"]
    assert files["files"][0] in (DEPLOY / "README.md").read_text("utf-8")
