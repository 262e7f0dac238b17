"""The files for Prometheus, Grafana and compose hold together, without any of them installed."""

import json
import re
import subprocess

import pytest
import yaml

from router.metrics import PREFIX
from scripts.docs import shown
from tests.watching.expressions import CONFIG, DASHBOARD, ROOT, alerts, drawn, panels, rules, selectors

RUNBOOKS = (ROOT / "docs/runbooks.md").read_text()
RECORDED = {rule["record"] for rule in rules("rules.yml")}
PROCESS = {"process_open_fds", "process_max_fds", "process_resident_memory_bytes", "process_cpu_seconds_total", "up"}


def exported() -> dict[str, set[str]]:
    """Every series a scrape can have, with its labels."""
    told = {name: {"job", "instance"} for name in PROCESS | RECORDED}
    for family in shown().families():
        names = {
            "counter": [family.name + "_total"],
            "gauge": [family.name],
            "histogram": [f"{family.name}_{part}" for part in ("bucket", "sum", "count")],
        }[family.kind]
        told |= {name: {*family.labels, "job", "instance", "le"} for name in names}
    return told


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_what_to_do(alert):
    name = alert["alert"]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", RUNBOOKS, re.M | re.S)
    assert section, "its runbook"
    assert "```sh\n" in section[1], "what to paste"
    assert "\n- " in section[1], "what to do"
    assert name in (CONFIG / "tests/alerts.yml").read_text(), "its unit test"


def test_no_runbook_is_left_over():
    assert re.findall(r"^## (Ebbtide\w+)$", RUNBOOKS, re.M) == [alert["alert"] for alert in alerts()]


def test_what_a_runbook_pastes_can_be_pasted():
    for block in re.findall(r"^```sh\n(.*?)^```", RUNBOOKS, re.M | re.S):
        read = subprocess.run(["/bin/sh", "-n"], input=block, text=True, capture_output=True, timeout=10, check=False)
        assert (read.returncode, read.stderr) == (0, ""), block
        for pattern in re.findall(r"^m '([^']+)'", block, re.M):
            assert any(re.search(pattern, name + "{workload=batch}") for name in exported()), pattern
        for expr in re.findall(r"^q '([^']+)'", block, re.M):
            assert {one.partition("{")[0] for one in selectors(expr)} <= set(exported()), expr


def test_everything_asked_for_is_exported():
    known = exported()
    asked = [*drawn(), *(rule["expr"] for rule in (*rules("rules.yml"), *alerts()))]
    for expr in asked:
        for one in selectors(expr):
            name, _, labels = one.partition("{")
            assert name in known, expr
            if name not in RECORDED:
                assert set(re.findall(r'(\w+)(?:=|!=|=~|!~)"', labels)) <= known[name], expr


def test_every_metric_of_ours_is_looked_at_somewhere():
    text = DASHBOARD.read_text() + "".join((CONFIG / name).read_text() for name in ("rules.yml", "alerts.yml"))
    unseen = {family.name.removeprefix(PREFIX) for family in shown().families() if family.name not in text}
    assert unseen <= {
        "call_duration_seconds", "queue_bytes", "oversized_events", "node_running", "node_room_sequences",
        "config_last_reload_success_timestamp_seconds", "discovery_nodes", "discovery_success_timestamp_seconds",
        "batch_lines_taken", "store_files", "node_rss_bytes", "node_ttft_drift_ratio", "node_gap_drift_ratio",
        "node_relay_drift_ratio", "agent_up", "canary_seconds", "node_recycles", "node_recycling", "node_recycle_due",
        "node_agent_up",
    }  # fmt: skip


def test_the_dashboard_is_well_formed():
    whole = json.loads(DASHBOARD.read_text())
    assert [panel["title"] for panel in whole["panels"] if panel["type"] == "row"] == [
        "Chat", "Queue", "Nodes", "Care of nodes", "Batches", "Relay", "Store and router",
    ]  # fmt: skip
    assert whole["templating"]["list"][0]["type"] == "datasource"
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in whole["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]


def test_compose_pins_images_and_mounts_what_is_there():
    whole = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services = whole["services"]
    assert set(services) == {"ebbtide", "prometheus", "grafana"}
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", services[name]["image"])
    mounts = [volume.split(":")[0] for one in services.values() for volume in one["volumes"]]
    for mount in mounts:
        if mount.startswith("./"):
            assert (ROOT / mount).is_dir()
        elif not mount.startswith("$"):
            assert mount in whole["volumes"]
    (scrape,) = yaml.safe_load((CONFIG / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["ebbtide:8080"]}]
    provided = yaml.safe_load((ROOT / "config/grafana/provisioning/dashboards/ebbtide.yml").read_text())
    (provider,) = provided["providers"]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in services["grafana"]["volumes"])
