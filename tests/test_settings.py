"""Settings: what is read, what is refused and how it is told."""

import hashlib
import time
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from router.core.call import Workload
from router.errors import SettingsError
from router.settings import FIELDS, NodeEntry, Settings, dump, load

ROOT = Path(__file__).resolve().parent.parent
NODES = 'nodes: [{name: a, url: "http://127.0.0.1:8001"}]\n'
SECRET = "hunter2-hunter2"


@pytest.fixture
def read(tmp_path):
    """Settings from a text and an environment."""

    def read(text, environ=None, overrides=None):
        path = tmp_path / "e.yaml"
        path.write_text(text)
        return load(path, environ or {}, overrides)

    return read


@pytest.fixture
def refused(read, tmp_path):
    """The lines of a refusal, with the file called F."""

    def refused(text, environ=None, overrides=None):
        with pytest.raises(SettingsError) as caught:
            read(text, environ, overrides)
        assert caught.value.__context__ is None
        return str(caught.value).replace(str(tmp_path / "e.yaml"), "F").splitlines()

    return refused


def test_the_smallest_file_gives_the_defaults(read):
    settings = read(NODES)
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8080)
    assert settings.nodes[0].pools == frozenset(Workload)
    assert settings.store.url.get_secret_value() == "sqlite:///var/ebbtide.db"
    assert settings.pools.batch.reserve == 0.25
    assert settings.relay is None


def test_settings_are_frozen(read):
    settings = read(NODES)
    with pytest.raises(ValidationError):
        settings.server.port = 1


@pytest.mark.parametrize(
    "path",
    [ROOT / "config/ebbtide.yaml", *sorted((ROOT / "config/examples").glob("*.yaml"))],
    ids=lambda path: path.name,
)
def test_shipped_files_load(path):
    names = ("CHAT_UI_KEY", "SUMMARISER_KEY", "RELAY_API_KEY", "GPUSTACK_API_KEY", "GPUSTACK_MANAGEMENT_KEY")
    assert load(path, {name: f"value-of-{name}" for name in names}).nodes


def test_the_commented_file_has_every_key_and_only_defaults():
    text = (ROOT / "config/ebbtide.yaml").read_text()
    assert not [way for way in FIELDS if f"{way[-1]}:" not in text]
    shown = load(ROOT / "config/ebbtide.yaml", {})
    plain = Settings(nodes=(NodeEntry(name="a", url="http://127.0.0.1:8001"),))
    assert shown == plain


# --- what is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("server:\n  prot: 1\n", "F:2: server.prot: unknown key; did you mean 'port'?"),
        ("servr: {}\n", "F:1: servr: unknown key; did you mean 'server'?"),
        (
            "server: {long_prompt_tokens: 1}\n",
            "F:1: server.long_prompt_tokens: unknown key; did you mean 'classify.long_prompt_tokens'?",
        ),
        ("server: {zzz: 1}\n", "F:1: server.zzz: unknown key"),
        ("server: {port: 70000}\n", "F:1: server.port: must be at most 65535"),
        ("server: {port: abc}\n", "F:1: server.port: must be a whole number"),
        ("server: {port: true}\n", "F:1: server.port: must be a number"),
        ("server: {port: 1.5}\n", "F:1: server.port: must be a whole number"),
        ("server: {drain_s: .inf}\n", "F:1: server.drain_s: must be at most 86400"),
        ("server: {drain_s: .nan}\n", "F:1: server.drain_s: must be over 0"),
        ("server: {drain_s: 0}\n", "F:1: server.drain_s: must be over 0"),
        (
            "server: {cors_origins: [x.org]}\n",
            "F:1: server.cors_origins.0: must be '*' or an origin such as https://chat.example.org",
        ),
        ("server: [1]\n", "F:1: server: must be a mapping"),
        (
            "log: {level: warn}\n",
            "F:1: log.level: must be one of 'debug', 'info', 'warning' or 'error'; did you mean 'warning'?",
        ),
        ("pools: {batch: {reserve: 1}}\n", "F:1: pools.batch.reserve: must be below 1"),
        (
            "store: {url: 'mysql://x'}\n",
            "F:1: store.url: must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME",
        ),
        ("relay: {url: 'https://r/v1', models: {}}\n", "F:1: relay.models: must not be empty"),
        ("relay: {url: 'https://r/v1', models: [a, a]}\n", "F:1: relay.models: names a model twice"),
        ("relay: {url: 'https://r/v1', models: {a: 1}}\n", "F:1: relay.models.a: must be text; quote it"),
        ("relay: {models: [a]}\n", "F:1: relay.url: is required"),
        ("keys: [{name: k, key: 12345678}]\n", "F:1: keys.0.key: must be text; quote it"),
        (
            "keys: [{name: k, key: 'sha256:12'}]\n",
            "F:1: keys.0.key: must hold 64 lower-case hexadecimal digits after sha256:",
        ),
        ("keys: [{name: k, key: ''}]\n", "F:1: keys.0.key: must be printable ASCII without spaces, and not empty"),
        ("server:\n  port: 1\n  port: 2\n", "F:3: server.port: is written twice; first on line 2"),
        ("server: {port: !!python/name:os.x 1}\n", "F:1: server.port: tags are not read"),
        ("server: {<<: {port: 1}}\n", "F:1: server: merge keys (<<) are not read; write the keys out"),
        ("server: {[a]: 1}\n", "F:1: server: keys must be text"),
        (
            "server:\n  port: '${NO_SUCH}'\n",
            "F:2: server.port: the environment variable NO_SUCH is not set; "
            "write ${NO_SUCH:-default} if it may be missing",
        ),
        ("server: {host: '${'}\n", "F:1: server.host: holds '${' without a variable; write $${ for a plain one"),
        (
            "server: {host: 0.0.0.0}\n",
            "F:1: server.host: others can reach this address: set keys, or server.allow_public_without_keys: true",
        ),
        ("server: {port: " + "9" * 5000 + "}\n", "F:1: server.port: is not a number that can be read"),
    ],
)
def test_a_bad_value_is_told_with_line_key_and_remedy(refused, text, line):
    assert refused(text + NODES) == [line]


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("ftp://a", "must be a URL"),
        ("a:8001", "must be a URL"),
        ("http://", "must be a URL"),
        ("http://a:99999", "must be a URL"),
        ("http://a b", "must be a URL"),
        ("http://[::1", "must be a URL"),
        ("http://a:0", "must be a URL"),
        ("http://a\\nb", "must be a URL"),
        (f"http://u:{SECRET}@a", "must not hold a user name"),
        ("http://a?x=1", "must not hold a query"),
        ("http://a/#f", "must not hold a query"),
    ],
)
def test_node_urls_are_plain(refused, url, rule):
    (line,) = refused(f'nodes: [{{name: a, url: "{url}"}}]\n')
    assert line.startswith(f"F:1: nodes.0.url: {rule}")
    assert SECRET not in line


@pytest.mark.parametrize("url", ["http://a", "https://a.b:1/v1", "http://[::1]:80", "http://10.0.0.1/x/v1-openai"])
def test_good_urls_lose_only_the_last_slash(read, url):
    assert read(f'nodes: [{{name: a, url: "{url}/"}}]\n').nodes[0].url == url


@pytest.mark.parametrize("name", ["relay", "other", "a b", "", "-a", "a" * 65, "\u00e9"])
def test_node_names_are_fit_for_headers_and_labels(refused, name):
    (line,) = refused(f'nodes: [{{name: "{name}", url: "http://a"}}]\n')
    assert line.startswith("F:1: nodes.0.name: ")


@pytest.mark.parametrize("pools", ["[]", "[chat]", "interactive"])
def test_pools_are_some_of_the_two(refused, pools):
    assert len(refused(f'nodes: [{{name: a, url: "http://a", pools: {pools}}}]\n')) == 1


def test_names_urls_and_keys_differ(refused):
    text = (
        'nodes:\n- {name: a, url: "http://a"}\n- {name: a, url: "http://a/"}\n'
        "keys:\n- {name: k, key: x}\n- {name: k, key: '%s'}\n" % ("sha256:" + hashlib.sha256(b"x").hexdigest())
    )
    assert refused(text) == [
        "F:3: nodes.1.name: is the same as nodes.0.name",
        "F:3: nodes.1.url: is the same as nodes.0.url",
        "F:6: keys.1.key: is the same as keys.0.key",
        "F:6: keys.1.name: is the same as keys.0.name",
    ]


def test_someone_must_answer(refused, read):
    assert refused("server: {port: 1}\n") == ["F: nodes: at least one node, or a relay, is needed"]
    assert read('relay: {url: "https://r/v1", models: [m]}\n').relay.models == {"m": "m"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_a_public_address_needs_keys_or_a_clear_word(refused, read, host):
    server = f"server: {{host: '{host}'}}\n"
    assert len(refused(NODES + server)) == 1
    assert read(NODES + server + "keys: [{name: k, key: x}]\n").server.public
    assert read(NODES, {"EBBTIDE_SERVER__ALLOW_PUBLIC_WITHOUT_KEYS": "true"}, {"server": {"host": host}}).server.public


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(read, host):
    assert not read(NODES + f"server: {{host: '{host}'}}\n").server.public


def test_everything_wrong_is_told_at_once(refused):
    text = (
        "server: {prot: 1, host: 0.0.0.0, port: x}\nnodes:\n- {name: a}\n- {nme: b, url: 'http://b'}\n"
        "log: {lvl: 1}\npools: {bach: {}}\n"
    )
    lines = refused(text, {"EBBTIDE_PROBE__EVRY_S": "1"}, {"store": {"url": 3}})
    assert [line.split(": ")[1] for line in lines] == [
        "server.port",
        "server.prot",
        "nodes.0.url",
        "nodes.1.name",
        "nodes.1.nme",
        "log.lvl",
        "pools.bach",
        "probe.evry_s",
        "store.url",
    ]


# --- what bounds the file -------------------------------------------------------------------------------------------

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (BOMB, "F: holds over 50000 values"),
        ("a: &a [*a]\n", "F: is nested over 16 levels deep"),
        ("[" * 500_000, "F: is nested over 16 levels deep"),
        ("- " * 500_000, "F: is nested over 16 levels deep"),
        ("#" * (2**20 + 1), "F: is over 1048576 bytes"),
        ("a: [\n", "F:2: is not YAML: expected the node content, but found '<stream end>'"),
        ("a: 1\n---\nb: 1\n", "F:2: is not YAML: but found another document"),
        ("a: \x00", "F: is not YAML: it holds characters that are not text"),
        ("- 1\n", "F:1: must be a mapping of sections, such as 'server:'"),
    ],
)
def test_files_that_cannot_be_read(refused, text, line):
    began = time.monotonic()
    assert refused(text) == [line]
    assert time.monotonic() - began < 5


def test_files_that_are_not_there_or_not_text(tmp_path):
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read: no such file or directory"):
        load(tmp_path / "none.yaml", {})
    with pytest.raises(SettingsError, match="cannot be read: is a directory"):
        load(tmp_path, {})
    (tmp_path / "e.yaml").write_bytes(b"a: \xff")
    with pytest.raises(SettingsError, match=r"is not UTF-8 text \(byte 3\)"):
        load(tmp_path / "e.yaml", {})


def test_a_key_without_a_value_is_not_said(read):
    assert read(NODES + "pools:\n  batch:\n    # reserve: 0.5\nrelay:\nserver: {port: }\n") == read(NODES)


def test_keys_that_yaml_takes_for_something_else_stay_text(read):
    assert read('relay: {url: "https://r/v1", models: {on: x, 1: y, 2020-01-01: z}}\n').relay.models == {
        "on": "x",
        "1": "y",
        "2020-01-01": "z",
    }


# --- environment, variables, overrides ------------------------------------------------------------------------------


def test_environment_over_file_and_command_line_over_both(read):
    environ = {
        "EBBTIDE_SERVER__PORT": "9000",
        "EBBTIDE_SERVER__DRAIN_S": "5",
        "EBBTIDE_NODES__0__ENGINE": "vllm",
        "OTHER": "x",
    }
    settings = read(NODES + "server: {port: 1, head_s: 7}\n", environ, {"server": {"port": 0}})
    assert (settings.server.port, settings.server.drain_s, settings.server.head_s) == (0, 5, 7)
    assert (settings.nodes[0].engine, settings.nodes[0].name) == ("vllm", "a")


def test_the_environment_of_the_process_is_not_looked_at(read, monkeypatch):
    monkeypatch.setenv("EBBTIDE_SERVER__PORT", "9000")
    monkeypatch.setenv("SERVER", '{"port": 9000}')
    assert read(NODES).server.port == 8080
    assert read(NODES, {"EBBTIDE_LOG__LEVEL": "error"}).server.port == 8080
    assert Settings(nodes=(NodeEntry(name="a", url="http://a"),)).server.port == 8080


def test_a_variable_replaces_what_an_option_merges(read):
    text = NODES + "server: {drain_s: 5, head_s: 7}\npools: {batch: {patience_s: 9}}\n"
    replaced = read(text, {"EBBTIDE_SERVER": "{port: 1}", "EBBTIDE_POOLS__BATCH": "{reserve: 0}"})
    assert (replaced.server.port, replaced.server.drain_s, replaced.pools.batch.patience_s) == (1, 600, 3600)
    merged = read(text, {"EBBTIDE_SERVER__HEAD_S": "8"}, {"server": {"port": 1}})
    assert (merged.server.port, merged.server.drain_s, merged.server.head_s) == (1, 5, 8)


def test_environment_alone_is_enough():
    environ = {
        f"EBBTIDE_NODES__{index}__{key}": value.format(index)
        for index in range(11)
        for key, value in (("NAME", "n{}"), ("URL", "http://n{}"))
    }
    assert [node.name for node in load(None, environ).nodes] == [f"n{index}" for index in range(11)]
    assert load(None, {"EBBTIDE_NODES": "[{name: a, url: http://127.0.0.1:8001, models: {p: own}}]"}).nodes[
        0
    ].models == {"p": "own"}


def test_variables_of_kubernetes_and_empty_ones_are_left_alone(read):
    environ = {
        "EBBTIDE_PORT": "tcp://10.0.0.1:8080",
        "EBBTIDE_SERVICE_HOST": "10.0.0.1",
        "EBBTIDE_PORT_8080_TCP_ADDR": "x",
        "EBBTIDE_SERVER__PORT": "",
    }
    assert read(NODES, environ) == read(NODES)


@pytest.mark.parametrize(
    ("name", "value", "rest"),
    [
        ("EBBTIDE_SERVR__PORT", "1", "servr: unknown key; did you mean 'server'?"),
        ("EBBTIDE_SERVER__PROT", "1", "server.prot: unknown key; did you mean 'port'?"),
        ("EBBTIDE_SERVER__PORT", SECRET, "server.port: must be a whole number"),
        ("EBBTIDE_NODES__5__URL", "http://x", "nodes.5.url: there is nothing here that this could be written into"),
        ("EBBTIDE_NODES__X__URL", "http://x", "nodes.x.url: there is nothing here that this could be written into"),
        ("EBBTIDE_KEYS", "[", "keys: is not YAML: expected the node content, but found '<stream end>'"),
        ("EBBTIDE_NODES", "[{name: a}]", "nodes.0.url: is required"),
    ],
)
def test_a_bad_variable_is_named(refused, name, value, rest):
    assert refused(NODES, {name: value}) == [f"{name}: {rest}"]


def test_interpolation(read):
    text = (
        NODES
        + 'relay: {url: "https://${HOST}/${PATH_:-v1}", api_key: "${K}", models: ["$${x}", "$5"]}\n'
        + 'server: {port: "${P:-9}"}\n'
    )
    settings = read(text, {"HOST": "r", "K": SECRET, "P": ""})
    assert settings.relay.url == "https://r/v1"
    assert settings.relay.api_key == SecretStr(SECRET)
    assert list(settings.relay.models) == ["${x}", "$5"]
    assert settings.server.port == 9


def test_a_variable_is_not_read_again(read):
    assert list(
        read(NODES + 'relay: {url: "http://r", models: ["${M}"]}\n', {"M": "${K}", "K": SECRET}).relay.models
    ) == ["${K}"]


# --- secrets --------------------------------------------------------------------------------------------------------


def test_secrets_are_never_shown(read):
    text = (
        'nodes: [{name: a, url: "http://a", api_key: "${S}"}]\nrelay: {url: "http://r", api_key: "${S}", models: [m]}\n'
        'keys: [{name: k, key: "${S}"}]\nstore: {url: "postgresql://u:${S}@h/d"}\n'
    )
    settings = read(text, {"S": SECRET})
    for shown in (repr(settings), str(settings), settings.model_dump_json(), str(dump(settings))):
        assert SECRET not in shown
    assert hashlib.sha256(SECRET.encode()).hexdigest() not in repr(settings)
    assert settings.keys[0].digest == hashlib.sha256(SECRET.encode()).digest()


@pytest.mark.parametrize("way", [way for way in FIELDS if "*" not in way])
def test_a_secret_in_the_wrong_place_is_not_shown_either(refused, way):
    overrides = f"sk-{SECRET} "
    for part in reversed(way):
        overrides = {part: overrides}
    assert SECRET not in "\n".join(refused(NODES.replace("a,", "relay,"), {}, overrides))
