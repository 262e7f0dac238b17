"""How an operator's URL is read."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import SettingsError
from router.upstream.target import Target


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://h", b"/v1", b""),
        ("http://h/", b"/v1", b""),
        ("http://h/v1", b"/v1", b""),
        ("http://h/v1/", b"/v1", b""),
        ("http://h/v1-openai", b"/v1-openai", b""),
        ("http://h/v2", b"/v2", b""),
        ("http://h/v1beta", b"/v1beta", b""),
        ("http://h/v1.1", b"/v1.1", b""),
        ("http://h/llm", b"/llm/v1", b"/llm"),
        ("http://h/llm/v1//", b"/llm/v1", b"/llm"),
        ("http://h/vllm", b"/vllm/v1", b"/vllm"),
        ("http://h/v100-node", b"/v100-node/v1", b"/v100-node"),
        ("http://h/a b".replace(" ", "%20"), b"/a%20b/v1", b"/a%20b"),
        ("http://h/modèle", b"/mod%C3%A8le/v1", b"/mod%C3%A8le"),
    ],
)
def test_bases(url, api, root):
    target = Target.parse(url)
    assert (target.api_base, target.root_base) == (api, root)
    assert target.path("chat/completions") == api + b"/chat/completions"
    assert target.path("tokenize", rooted=True) == root + b"/tokenize"
    assert target.url("models") == "http://h" + api.decode() + "/models"


@pytest.mark.parametrize(
    ("url", "host", "port", "header"),
    [
        ("http://Node.local", "node.local", 80, b"node.local"),
        ("http://node:80", "node", 80, b"node"),
        ("http://node:8001", "node", 8001, b"node:8001"),
        ("https://node", "node", 443, b"node"),
        ("https://node:80", "node", 80, b"node:80"),
        ("http://[::1]:8001/v1", "::1", 8001, b"[::1]:8001"),
        ("http://[::1]", "::1", 80, b"[::1]"),
        ("http://bücher.example", "xn--bcher-kva.example", 80, b"xn--bcher-kva.example"),
    ],
)
def test_addresses(url, host, port, header):
    target = Target.parse(url)
    assert (target.host, target.port, target.host_header) == (host, port, header)


@pytest.mark.parametrize(
    "url",
    [
        "", "node:8001", "ftp://node", "http://", "http://:80", "http://node:0", "http://node:99999", "http://node:x",
        "http://user:hunter2@node", "http://node?x=hunter2", "http://node#f", "http://no de", "http://node\r\nX: y",
        "http://[::1", "http://\u00b8", "http://a_b$", "http://[::1%a b]", "http://" + "a" * 300,
    ],
)  # fmt: skip
def test_what_is_refused(url):
    with pytest.raises(SettingsError) as caught:
        Target.parse(url)
    assert "hunter2" not in str(caught.value)


def test_the_key_is_sent_and_never_shown():
    target = Target.parse("https://node", api_key="sk-hunter2")
    assert target.authorization == b"Bearer sk-hunter2"
    assert "hunter2" not in repr(target)
    assert Target.parse("https://node").authorization is None
    for key in ("", " ", "a\r\nX: y", "clé"):
        with pytest.raises(SettingsError):
            Target.parse("http://node", api_key=key)


def test_tls_only_for_https():
    context = ssl.create_default_context()
    assert Target.parse("http://node").tls is None
    assert Target.parse("https://node", tls=context).tls is context
    default = Target.parse("https://node").tls
    assert default is not None
    assert default.check_hostname
    assert default.verify_mode == ssl.CERT_REQUIRED


@given(st.text(st.characters(), max_size=40))
def test_a_path_can_never_break_the_request_line(path):
    line = Target.parse("http://node/v1").path(path)
    assert line.startswith(b"/v1/")
    assert all(0x21 <= byte <= 0x7E for byte in line)
    assert not {b"?", b"#"} & {line[i : i + 1] for i in range(len(line))}


@given(st.text(max_size=60))
def test_any_url_is_read_or_refused(url):
    for text in (url, f"http://{url}", f"http://node/{url}"):
        try:
            target = Target.parse(text)
        except SettingsError:
            continue
        assert all(0x21 <= byte <= 0x7E for byte in target.host_header + target.api_base + target.root_base)
