"""Settings: what holds for any file. A dump reads back equal, no text breaks the reader, what is put is there."""

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as trial
from hypothesis import strategies as st
from pydantic import SecretStr

from router.core.call import Workload
from router.errors import SettingsError
from router.settings import Settings, dump, load, variable
from router.settings.document import Document, Place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for the many files of property tests."""
    return tmp_path_factory.mktemp("settings")


words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
models = st.dictionaries(st.one_of(words, st.just("${x}")), words, max_size=3)
names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,8}\Z").filter(lambda name: name not in ("relay", "other", "none"))
secrets = st.one_of(st.none(), words.map(SecretStr))
counts = st.one_of(st.none(), st.integers(1, 10**9))
pools = st.sets(st.sampled_from(Workload), min_size=1)
node = st.fixed_dictionaries(
    {"api_key": secrets, "models": models, "context": counts, "kv_tokens": counts, "pools": pools}
)
tree = st.fixed_dictionaries(
    {
        "nodes": st.dictionaries(names, node, min_size=1, max_size=3),
        "relay": st.one_of(st.none(), st.fixed_dictionaries({"api_key": secrets, "models": models.filter(bool)})),
        "keys": st.dictionaries(names, st.binary(min_size=32, max_size=32), max_size=3),
        "server": st.fixed_dictionaries({"port": st.integers(0, 65535), "drain_s": st.floats(0.001, 86400)}),
        "store": st.sampled_from(["sqlite:///x", "postgresql://u:p@h/d"]),
    }
)


@trial(max_examples=40, deadline=None)
@given(tree)
def test_dump_reads_back(folder, tree):
    settings = Settings.model_validate(
        {
            "nodes": [
                {"name": name, "url": f"http://h/{index}", **rest}
                for index, (name, rest) in enumerate(tree["nodes"].items())
            ],
            "relay": tree["relay"] and {"url": "https://r/v1", **tree["relay"]},
            "keys": [
                {"name": f"{index}{name}", "key": bytes([index]) + digest[1:]}
                for index, (name, digest) in enumerate(tree["keys"].items())
            ],
            "server": tree["server"],
            "store": {"url": tree["store"]},
        }
    )
    environ = {
        variable(("nodes", index, "api_key")): node.api_key.get_secret_value()
        for index, node in enumerate(settings.nodes)
        if node.api_key
    }
    if settings.relay and settings.relay.api_key:
        environ[variable(("relay", "api_key"))] = settings.relay.api_key.get_secret_value()
    environ[variable(("store", "url"))] = settings.store.url.get_secret_value()
    path = folder / "round.yaml"
    path.write_text(yaml.safe_dump(dump(settings)))
    assert load(path, environ) == settings


@trial(max_examples=60, deadline=None)
@given(st.text())
def test_no_text_breaks_the_reader(folder, text):
    path = folder / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SettingsError):
        load(path, {})


@trial(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3), st.sampled_from("ab")), min_size=1, max_size=4), st.integers())
def test_what_is_put_is_there(loc, value):
    document = Document("d")
    document.put(tuple(loc), value, Place("p"))
    if document.problems:
        return
    found = document.tree
    for part in loc:
        found = found[part]
    assert found == value
    assert document.place((*loc, "deeper")) == Place("p")
