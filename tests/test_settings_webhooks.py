"""What an operator may say about webhooks, and what is refused."""

import pytest

from router import assembly
from router.errors import SettingsError
from router.settings import Settings, dump, load

NODES = 'nodes: [{name: a, url: "http://127.0.0.1:8001"}]\n'
SECRET = "whsec_" + "c2VjcmV0IHdpdGggMzIgYnl0ZXMgb2YgcmFuZG9tIQ=="
OTHER = "whsec_" + "YW5vdGhlciBzZWNyZXQgb2YgMzIgcmFuZG9tIGJ5dGU="


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> Settings:
        (tmp_path / "e.yaml").write_text(NODES + text)
        return load(tmp_path / "e.yaml", {})

    return read


def test_without_a_word_nobody_is_told(read):
    settings = read("")
    assert not settings.webhooks.allowed_hosts
    assert not settings.webhooks.allow_private
    assert sum(settings.webhooks.retry_s) > 3 * 86400 - 4000


def test_what_is_said_reaches_the_receivers(read):
    settings = read(
        f"webhooks: {{allowed_hosts: [Hooks.Example, '*.apps.example'], secret: {SECRET}, previous_secret: {OTHER}}}\n"
        "keys:\n"
        f"- {{name: ann, key: x, webhook_url: 'https://hooks.example/?t=hunter2', webhook_secret: {OTHER}}}\n"
        "- {name: bob, key: y}\n"
    )
    receivers = assembly.receivers(settings)
    assert receivers.asked("ann", None) == "https://hooks.example/?t=hunter2"
    assert receivers.asked("bob", None) is None
    assert receivers.asked("bob", "https://x.apps.example/") == "https://x.apps.example/"
    assert len(receivers.signature("bob", "evt_1", 1, "{}").split(" ")) == 2
    assert len(receivers.signature("ann", "evt_1", 1, "{}").split(" ")) == 1
    shown = f"{settings!r} {dump(settings)}"
    assert not [word for word in (SECRET, OTHER, "hunter2") if word in shown]


WRONG = {
    "webhooks: {allowed_hosts: [a.example]}": "webhooks.secret: is needed with allowed_hosts",
    "webhooks: {secret: hunter2}": "webhooks.secret: must be whsec_",
    "webhooks: {secret: whsec_aHVudGVyMg==}": "webhooks.secret: must be whsec_",
    "webhooks: {previous_secret: hunter2}": "webhooks.previous_secret: must be whsec_",
    "webhooks: {retry_s: [0]}": "webhooks.retry_s.0: ",
    "webhooks: {retry_s: [86401]}": "webhooks.retry_s.0: ",
    "keys: [{name: a, key: x, webhook_url: 'https://a.example/'}]": "keys.0.webhook_url: the operator does not allow",
    "keys: [{name: a, key: x, webhook_url: hunter2}]": "keys.0.webhook_url: must be a URL",
    "keys: [{name: a, key: x, webhook_secret: hunter2}]": "keys.0.webhook_secret: must be whsec_",
    **{
        f"webhooks: {{allowed_hosts: ['{host}'], secret: {SECRET}}}": "webhooks.allowed_hosts.0: must be a host name"
        for host in ("", "https://a.example", "a.example/x", "a.example:443", "*", "*.", "a.*.example", "*a.example")
    },
}


@pytest.mark.parametrize(("text", "told"), WRONG.items())
def test_what_is_refused(read, text, told):
    with pytest.raises(SettingsError) as caught:
        read(text)
    (line,) = str(caught.value).splitlines()
    assert told in line
    assert "hunter2" not in line
