"""What differs between two settings, in words without values, and files of nodes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.errors import SettingsError
from router.settings import FIELDS, Settings, agent_url, changes, load, load_nodes
from router.settings.changes import LIVE

A = {"name": "a", "url": "http://127.0.0.1:8001"}
B = {"name": "b", "url": "http://127.0.0.1:8002"}
RELAY = {"url": "https://relay.example/v1", "models": ["m"], "api_key": "sk-secret"}
KEY = {"name": "ann", "key": "sk-secret"}
DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    def read(**said: Any) -> Settings:
        path = tmp_path / "e.yaml"
        path.write_text(yaml.safe_dump({"nodes": [A], **said}))
        return load(path, {})

    return read


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {}, []),
        ({"nodes": [A, B]}, {"nodes": [B, A]}, []),
        ({}, {"nodes": [B]}, ["nodes.a removed", "nodes.b added"]),
        ({}, {"nodes": [{**A, "url": B["url"], "context": 5}]}, ["nodes.a changed (url, context)"]),
        ({}, {"relay": RELAY}, ["relay added"]),
        ({"relay": RELAY}, {"relay": {**RELAY, "api_key": "sk-new"}}, ["relay.api_key changed"]),
        ({"relay": RELAY}, {}, ["relay removed"]),
        ({"keys": [KEY]}, {"keys": [{**KEY, "key": "sk-new"}]}, ["keys.ann changed (key)"]),
        ({"keys": [KEY]}, {"keys": [{**KEY, "quota": {"files": 1}}]}, ["keys.ann changed (quota)"]),
        ({}, {"pools": {"batch": {"reserve": 0.5}}}, ["pools.batch.reserve changed"]),
        ({}, {"store": {"url": "sqlite:///x.db"}}, ["store.url changed"]),
        (
            {"discovery": {"dns": [{"name": "x.svc", "port": 1}]}},
            {"discovery": {"dns": [{"name": "x.svc", "port": 2}]}},
            ["discovery.dns.x.svc:1 removed", "discovery.dns.x.svc:2 added"],
        ),
    ],
)
def test_changes_are_named_and_values_are_not(settings: Any, before: Any, after: Any, told: list[str]) -> None:
    assert [str(change) for change in changes(settings(**before), settings(**after))] == told


@pytest.mark.parametrize(
    ("said", "live"),
    [
        ({"server": {"drain_s": 1}}, True),
        ({"server": {"port": 1}}, False),
        ({"server": {"cors_origins": ["*"]}}, False),
        ({"store": {"url": "sqlite:///x.db"}}, False),
        ({"batches": {"retries": 1}}, False),
        ({"log": {"level": "debug"}}, True),
        ({"nodes": [B]}, True),
        ({"relay": RELAY}, True),
        ({"classify": {"long_prompt_tokens": 1}}, True),
    ],
)
def test_what_takes_effect_without_a_restart(settings: Any, said: Any, live: bool) -> None:
    found = changes(settings(), settings(**said))
    assert found
    assert {change.live for change in found} == {live}


def test_every_key_that_is_live_exists_and_is_documented() -> None:
    page = (DOCS / "operations.md").read_text()
    ways = {".".join(way) for way in FIELDS}
    assert [key for key in LIVE if key not in ways] == []
    assert [key for key in LIVE if f"`{key}`" not in page] == []


# files of nodes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("n.yaml", yaml.safe_dump([A, B])),
        ("n.yaml", yaml.safe_dump({"nodes": [A, B]})),
        ("n.json", json.dumps([A, B], indent="\t")),
        ("n.json", json.dumps({"nodes": [A, B]})),
    ],
)
def test_a_file_of_nodes_is_a_list_or_holds_one(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert [node.name for node in load_nodes(path)] == ["a", "b"]
    path.write_text("[]")
    assert load_nodes(path) == ()


def test_a_file_of_nodes_learns_no_secret_of_the_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_API_KEY", "sk-secret")
    path = tmp_path / "n.yaml"
    path.write_text(yaml.safe_dump([{**A, "api_key": "${RELAY_API_KEY}"}]))
    (node,) = load_nodes(path)
    assert node.api_key is not None
    assert node.api_key.get_secret_value() == "${RELAY_API_KEY}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "F: holds no list; write [] for an empty one"),
        ("just text\n", "F: holds no list; write [] for an empty one"),
        ("- {name: a, url: 'http://x:1', pool: []}\n", "F:1: nodes.0.pool: unknown key; did you mean 'pools'?"),
        (
            "- {name: a, url: 'http://x:1'}\n- {name: a, url: 'http://y:1'}\n",
            "F:2: nodes.1.name: is the same as nodes.0.name",
        ),
        ("nodes: []\nkeys: []\n", "F:2: keys: unknown key"),
        ("- [\n", "F:2: is not YAML: expected the node content, but found '<stream end>'"),
    ],
)
def test_what_is_wrong_in_a_file_of_nodes_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "n.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_nodes(path)
    assert str(caught.value).replace(str(path), "F") == told


@pytest.mark.parametrize("name", ["", "a b", "-a.svc", "a..svc", "http://a", "a/b", "x" * 64])
def test_a_name_to_look_up_is_a_dns_name(settings: Any, name: str) -> None:
    with pytest.raises(SettingsError, match=r"discovery.dns.0.name: must be a DNS name"):
        settings(discovery={"dns": [{"name": name, "port": 8000}]})


def test_names_to_look_up_differ(settings: Any) -> None:
    one = {"name": "a.svc", "port": 8000}
    with pytest.raises(SettingsError, match=r"discovery.dns.1.name: and port are those of dns.0"):
        settings(discovery={"dns": [one, {**one, "name": "A.svc."}]})
    assert settings(nodes=[], discovery={"dns": [one]}).nodes == ()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"url": "http://g"}, r"discovery.gpustack.api_key: is required"),
        ({"url": "g", "api_key": "k"}, r"discovery.gpustack.url: must be a URL"),
        (
            {"url": "http://g", "api_key": "k", "models": {"a": "b"}, "model_pools": {"a": ["batch"]}},
            r"discovery.gpustack.model_pools.a: is not one of discovery.gpustack.models; write GPUStack's own name",
        ),
        ({"url": "http://g", "api_key": "k", "model_pools": {"a": []}}, r"model_pools.a: must not be empty"),
        ({"url": "http://g", "api_key": "k", "model_pools": {"a": ["chat"]}}, r"must be one of"),
    ],
)
def test_a_gpustack_that_cannot_be_asked(settings: Any, said: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        settings(discovery={"gpustack": said})


def test_gpustack_alone_is_enough(settings: Any) -> None:
    said = {"url": "http://g", "api_key": "k", "models": ["a"], "model_pools": {"a": ["batch"]}}
    found = settings(nodes=[], discovery={"gpustack": said}).discovery
    assert found.sources == ("gpustack",)
    assert "k'" not in repr(found.gpustack)


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("http://10.0.0.5:9400", "must hold {host}: each node has an agent of its own"),
        ("http://{host}:{prt}", "may hold {host}, {port} and {port+1000}, and no other braces"),
        ("http://{host}:{port-1}", "may hold {host}, {port} and {port+1000}, and no other braces"),
        ("{host}:{port}", "must be a URL such as"),
        ("http://u:p@{host}", "must not hold a user name or password"),
        ("http://{host}:{port+65535}", "must be a URL such as"),
    ],
)
def test_where_agents_of_discovered_nodes_are(settings: Any, agent: str, told: str) -> None:
    one = {"name": "a.svc", "port": 8000, "agent": agent}
    with pytest.raises(SettingsError, match=re.escape(f"discovery.dns.0.agent: {told}")):
        settings(discovery={"dns": [one]})


@pytest.mark.parametrize(
    ("template", "host", "port", "url"),
    [
        ("http://{host}:9400", "10.0.0.5", 8000, "http://10.0.0.5:9400"),
        ("http://{host}:{port+1000}", "[fd00::5]", 40001, "http://[fd00::5]:41001"),
        ("https://agents.example/{host}/{port}", "10.0.0.5", 8000, "https://agents.example/10.0.0.5/8000"),
        ("http://{host}:{port+30000}", "10.0.0.5", 40000, None),
    ],
)
def test_the_agent_beside_a_discovered_node(template: str, host: str, port: int, url: str | None) -> None:
    assert agent_url(template, host, port) == url
