"""Which URLs may be told, one row each; secrets; and a signature made by hand."""

import base64
import hashlib
import hmac

import pytest

from router.errors import BadRequest, HookRefused
from router.jobs.receivers import Receivers, secret_bytes

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
STRICT = Receivers(allowed=["hooks.example", "*.apps.example", "93.184.216.34", "2606:2800:220:1::1"])
OPEN = Receivers(allowed=STRICT.allowed, allow_private=True)

GOOD = {
    "https://hooks.example": ("hooks.example", 443, "/"),
    "https://hooks.example/": ("hooks.example", 443, "/"),
    "HTTPS://HOOKS.example./a//b?c=d&e=%20#": None,
    "https://HOOKS.Example./a//b?c=d&e=%20": ("hooks.example", 443, "/a//b?c=d&e=%20"),
    "https://hooks.example:8443?x": ("hooks.example", 8443, "/?x"),
    "https://a.apps.example/": ("a.apps.example", 443, "/"),
    "https://a.b.apps.example/": ("a.b.apps.example", 443, "/"),
    "https://93.184.216.34/": ("93.184.216.34", 443, "/"),
    "https://[2606:2800:220:1::1]:1/": ("2606:2800:220:1::1", 1, "/"),
}
BAD = [
    "", "hooks.example", "//hooks.example", "ftp://hooks.example/", "file:///etc/passwd", "https://", "https:///x",
    "https:hooks.example", "http://hooks.example/", "https://hooks.example.evil.example/", "https://evil-hooks.example/",
    "https://apps.example/", "https://evilapps.example/", "https://hooks.example@evil.example/",
    "https://user:pw@hooks.example/", "https://evil.example#hooks.example", "https://evil.example/#@hooks.example",
    "https://evil.example\\@hooks.example/", "https://hooks.example\\.evil.example/", "https://hooks.example:0/",
    "https://hooks.example:99999/", "https://hooks.example:x/", "https://hooks.example /",
    "https://hooks.example/\r\nX: y",
    "https://hooks.example/\t", "https://hooks.example/\x00", "https://hooks.example/ü", "https://\uff48ooks.example/",
    "https://127.0.0.1/", "https://localhost/", "https://2130706433/", "https://[::1]/", "https://[::1",
    "https://[v1.x]/",
    "https://hooks.example/" + "x" * 2048,
]  # fmt: skip


@pytest.mark.parametrize(("url", "parts"), [row for row in GOOD.items() if row[1]])
def test_allowed(url, parts):
    found = STRICT.read(url)
    assert (found.host, found.port, found.target) == parts


@pytest.mark.parametrize("url", [*BAD, *(url for url, parts in GOOD.items() if not parts)])
def test_refused(url):
    with pytest.raises(HookRefused) as caught:
        STRICT.read(url)
    assert "pw" not in str(caught.value)
    with pytest.raises(BadRequest) as told:
        STRICT.asked("ann", url)
    assert (told.value.param, told.value.code) == ("webhook", "invalid_value")


def test_http_is_for_those_who_allow_private_addresses():
    receiver = OPEN.read("http://hooks.example:8080/x")
    assert (receiver.port, receiver.host_header) == (8080, "hooks.example:8080")
    assert OPEN.read("http://hooks.example/").host_header == "hooks.example"
    assert OPEN.read("http://hooks.example/").at("::1") == "http://[::1]:80/"
    assert STRICT.read("https://[2606:2800:220:1::1]:1/?q").host_header == "[2606:2800:220:1::1]:1"


def test_a_key_may_have_a_receiver_of_its_own():
    receivers = Receivers(allowed=["h.example"], defaults={"ann": "https://h.example/ann"})
    assert receivers.asked("ann", None) == "https://h.example/ann"
    assert receivers.asked("ann", "https://h.example/x") == "https://h.example/x"
    assert receivers.asked("bob", None) is None


def test_where_nobody_is_allowed_whoever_asks_hears_so():
    assert Receivers().asked("ann", None) is None
    with pytest.raises(BadRequest, match="sends no webhooks"):
        Receivers().asked("ann", "https://hooks.example/")


def test_the_signature_is_the_formula_of_standard_webhooks():
    receivers = Receivers(secrets=[secret_bytes(SECRET)], own={"bob": [b"x" * 24]})
    body = '{"id":"evt_1","ü":1}'

    def by_hand(key):
        signed = hmac.new(key, b"evt_1.1700000000." + body.encode(), hashlib.sha256).digest()
        return "v1," + base64.b64encode(signed).decode()

    assert receivers.signature("ann", "evt_1", 1700000000, body) == by_hand(KEY)
    assert receivers.signature(None, "evt_1", 1700000000, body) == by_hand(KEY)
    assert receivers.signature("bob", "evt_1", 1700000000, body) == by_hand(b"x" * 24)


@pytest.mark.parametrize("size", [24, 32, 64])
def test_secrets(size):
    assert secret_bytes("whsec_" + base64.b64encode(b"k" * size).decode()) == b"k" * size


@pytest.mark.parametrize(
    "text",
    ["", "whsec_", "whsec_abc", SECRET.removeprefix("whsec_"), SECRET + "!", "whsec_" + "a" * 31,
     "whsec_" + base64.b64encode(b"k" * 23).decode(), "whsec_" + base64.b64encode(b"k" * 65).decode(), "whsec_ü"],
)  # fmt: skip
def test_what_is_no_secret_is_refused(text):
    with pytest.raises(ValueError, match="whsec_"):
        secret_bytes(text)


def test_nothing_shows_a_secret():
    receivers = Receivers(secrets=[KEY], own={"a": [KEY]}, defaults={"a": "https://h/?t=hunter2"}, allowed=["h"])
    assert repr(KEY)[2:20] not in repr(receivers)
    assert "hunter2" not in repr(receivers)
    assert "hunter2" not in repr(receivers.read("https://h/?t=hunter2"))
