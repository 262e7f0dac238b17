"""What the door reads from headers, forms and bodies, and how it words errors: pure functions over bytes."""

from hashlib import sha256
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from router.api import errors, headers
from router.api.auth import ANYBODY, Caller, Keyring, presented
from router.api.forms import read_form
from router.api.owners import Owners, with_known_tier
from router.core.body import Body, read_body
from router.core.call import ENDPOINTS, Call, Reason, Usage, Workload
from router.dispatch.reply import Reply
from router.errors import (
    Answer,
    BadRequest,
    NotFound,
    Overloaded,
    RateLimited,
    TooLarge,
    Unauthorized,
    UnsupportedEndpoint,
    UpstreamTimeout,
)

ANN = Caller(name="ann", workload=Workload.BATCH, fallback=False)


@pytest.fixture
def ring() -> Keyring:
    return Keyring([(sha256(b"sk-ann").digest(), ANN)])


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer sk-ann"),
        (b"authorization", b"bearer  sk-ann "),
        (b"x-api-key", b"sk-ann"),
        (b"api-key", b"sk-ann"),
    ],
)
def test_a_key_is_found_in_each_of_its_headers(ring: Keyring, header: tuple[bytes, bytes]) -> None:
    assert ring.caller([(b"accept", b"*/*"), header]) is ANN
    assert ring.caller([(b"accept", b"*/*"), header, (b"accept", b"text/plain")]) is ANN


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer sk-bob")],
        [(b"authorization", b"Basic sk-ann")],
        [(b"authorization", b"Bearer sk-ann"), (b"authorization", b"Bearer sk-ann")],
        [(b"authorization", b"Bearer sk-ann"), (b"accept", b"*/*"), (b"authorization", b"Bearer sk-bob")],
        [(b"authorization", b""), (b"x-api-key", b"sk-ann")],
        [(b"authorization", b"Bearer sk-bob"), (b"x-api-key", b"sk-ann")],
    ],
)
def test_anything_else_is_refused_and_the_key_is_not_repeated(ring: Keyring, sent: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Unauthorized) as refused:
        ring.caller(sent)
    assert refused.value.code == "invalid_api_key"
    assert "sk-" not in refused.value.message


def test_without_keys_everybody_is_let_in() -> None:
    assert Keyring().caller([(b"authorization", b"Basic x")]) is ANYBODY


def test_no_key_is_none() -> None:
    assert presented([(b"accept", b"*/*")]) is None


def test_headers_pass_but_for_the_connections_own_and_credentials() -> None:
    kept = [(b"traceparent", b"00-1"), (b"x-custom", b"1"), (b"x-custom", b"2"), (b"x-stainless-retry-count", b"1")]
    dropped = [
        b"host", b"authorization", b"x-api-key", b"api-key", b"cookie", b"content-length", b"transfer-encoding", b"te",
        b"expect", b"proxy-authorization", b"proxy-connection", b"openai-organization", b"openai-project", b"upgrade",
        b"x-ebbtide-workload", b"x-ebbtide-node", b"accept-encoding", b"x-request-id", b"keep-alive", b"x-hop",
    ]  # fmt: skip
    connection = (b"connection", b"close, X-Hop")
    heading = headers.read([*kept, *((name, b"v") for name in dropped), connection])
    assert heading.passed == tuple(kept)


def test_what_headers_say() -> None:
    heading = headers.read(
        [
            (b"content-type", b"application/json"),
            (b"content-length", b"12"),
            (b"x-ebbtide-workload", b" Batch "),
            (b"x-stainless-retry-count", b"2"),
            (b"x-stainless-timeout", b"20"),
            (b"x-stainless-read-timeout", b"600"),
        ]
    )
    assert (heading.content_length, heading.workload, heading.retried, heading.deadline_s) == (12, "batch", True, 20.0)
    silent = headers.read([(b"x-stainless-retry-count", b"0"), (b"x-stainless-timeout", b"nan")])
    assert (silent.content_length, silent.workload, silent.retried, silent.deadline_s) == (None, None, False, None)


def _told(answer: Answer) -> dict[bytes, bytes]:
    return dict(errors.headers(answer, 2))


def test_an_error_is_openais_object() -> None:
    told = msgspec.json.decode(errors.body(TooLarge("no", param="x"), anthropic=False))
    inner = {"message": "no", "type": "invalid_request_error", "param": "x", "code": "payload_too_large"}
    assert told == {"error": inner}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (413, "request_too_large"), (415, "invalid_request_error"), (429, "rate_limit_error"),
        (500, "api_error"), (502, "api_error"), (503, "overloaded_error"),
    ],
)  # fmt: skip
def test_anthropics_type_follows_from_the_status(status: int, kind: str) -> None:
    told = msgspec.json.decode(errors.envelope(status, "no"))
    assert told == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_when_to_come_back() -> None:
    assert _told(Overloaded("full", retry_after_s=7))[b"retry-after"] == b"7"
    assert _told(Overloaded("full"))[b"retry-after"] == b"1"
    assert _told(RateLimited("much", retry_after_s=999))[b"retry-after"] == b"60"
    assert _told(UpstreamTimeout("late", retry=False))[b"x-should-retry"] == b"false"
    assert _told(UnsupportedEndpoint("no"))[b"x-should-retry"] == b"false"
    assert b"x-should-retry" not in _told(BadRequest("no"))
    assert _told(Unauthorized("no"))[b"www-authenticate"] == b"Bearer"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"error":"x"}', b"\xff"])
def test_an_error_nobody_can_read_still_has_words(raw: bytes) -> None:
    assert errors.inner(raw).message


def _form(*parts: tuple[str, str], end: str = "--b--\r\n") -> bytes:
    told = (f"--b\r\nContent-Disposition: form-data; {name}\r\n\r\n{value}\r\n" for name, value in parts)
    return ("".join(told) + end).encode()


FILE = ('name="file"; filename="a.wav"', "RIFF" + "x" * 5000)
TYPE = b"multipart/form-data; boundary=b"


@pytest.mark.parametrize("order", [1, -1])
def test_the_model_is_found_wherever_it_stands(order: int) -> None:
    body = read_form(TYPE, _form(*[('name="model"', "whisper"), FILE, ('name="stream"', "true")][::order]))
    assert (body.model, body.stream) == ("whisper", True)


def test_a_file_called_model_is_not_the_model() -> None:
    body = read_form(TYPE, _form(('name="model"; filename="m"', "evil"), ('name="model"', "whisper")))
    assert (body.model, body.stream) == ("whisper", False)


@pytest.mark.parametrize(
    ("content_type", "raw"),
    [
        (TYPE, _form(FILE)),
        (TYPE, _form(('name="model"', "a"), ('name="model"', "b"))),
        (TYPE, _form(('name="model"', "a" * 6000))),
        (TYPE, _form(('name="model"', "a"), end="")),
        (TYPE, b"nothing like a form"),
        (TYPE, b""),
        (b"multipart/form-data", _form(('name="model"', "a"))),
        (b"multipart/form-data; boundary=" + b"b" * 300, _form(('name="model"', "a"))),
        (b"multipart/mixed; boundary=b", _form(('name="model"', "a"))),
    ],
)
def test_a_form_that_could_be_read_in_two_ways_or_none_is_refused(content_type: bytes, raw: bytes) -> None:
    with pytest.raises(BadRequest):
        read_form(content_type, raw)


def _responses(raw: bytes) -> Body:
    return read_body(ENDPOINTS["responses"], raw)


@pytest.mark.parametrize(
    ("raw", "sent"),
    [
        (b'{"model":"m","service_tier":"fast"}', b'{"model":"m","service_tier":"priority"}'),
        (b'{"service_tier" : "ultrafast" , "model":"m"}', b'{"service_tier" : "priority" , "model":"m"}'),
        (
            b'{"metadata":{"service_tier":"fast"},"model":"m","service_tier":"fast"}',
            b'{"metadata":{"service_tier":"fast"},"model":"m","service_tier":"priority"}',
        ),
        (
            b'{"input":"\\"service_tier\\":\\"fast\\" {","model":"service_tier","service_tier":"fast"}',
            b'{"input":"\\"service_tier\\":\\"fast\\" {","model":"service_tier","service_tier":"priority"}',
        ),
    ],
)
def test_only_the_tier_itself_is_replaced(raw: bytes, sent: bytes) -> None:
    assert with_known_tier(raw, _responses(raw)) == sent


@pytest.mark.parametrize("raw", [b'{"model":"m","service_tier":"flex"}', b'{"model":"m","input":"service_tier fast"}'])
def test_other_bodies_are_the_same_object(raw: bytes) -> None:
    assert with_known_tier(raw, _responses(raw)) is raw


def _call(caller: str = "ann", method: str = "POST") -> Call:
    return Call(
        id="req_1",
        endpoint=ENDPOINTS["responses"],
        model="m",
        body=b"",
        prompt_tokens=1,
        output_tokens=1,
        workload=Workload.INTERACTIVE,
        reason=Reason.DEFAULT,
        caller=caller,
        method=method,
    )


def _reply(response_id: str | None, usage: Usage | None = None, status: int = 200) -> Reply:
    trip = SimpleNamespace(counted=lambda: usage)
    reply: Any = SimpleNamespace(response_id=response_id, status=status, node="a", trip=trip)
    return cast(Reply, reply)


def test_an_owner_is_found_by_its_caller_only_and_carries_its_tokens() -> None:
    owners = Owners()
    owners.note(_call(), _reply("resp_1"))
    owners.note(_call(), _reply("resp_1", Usage(100, 20)))
    owners.note(_call(), _reply(None))
    owners.note(_call(), _reply("resp_2", status=500))
    found = owners.find(ANN, "resp_1")
    assert found is not None
    assert (found.node, found.model, found.tokens) == ("a", "m", 120)
    assert owners.find(Caller(name="bob"), "resp_1") is None
    assert len(owners) == 1
    owners.note(_call(method="DELETE"), _reply("resp_1"))
    assert owners.find(ANN, "resp_1") is None


def test_the_oldest_owner_is_forgotten_first() -> None:
    owners = Owners(kept=2)
    for number in range(2):
        owners.note(_call(), _reply(f"resp_{number}"))
    owners.find(ANN, "resp_0")
    owners.note(_call(), _reply("resp_2"))
    assert [owners.find(ANN, f"resp_{number}") is not None for number in range(3)] == [True, False, True]


def test_continuing_a_response_nobody_made_is_a_404() -> None:
    body = _responses(b'{"model":"m","previous_response_id":"resp_x"}')
    with pytest.raises(NotFound) as refused:
        Owners().earlier(ANN, body)
    assert refused.value.param == "previous_response_id"
