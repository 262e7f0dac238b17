"""Requests at the edge: which are let in, which are refused and how, over real sockets through the whole router."""

import asyncio
import json
from typing import Any

import pytest

from tests.conftest import Rig
from tests.fakes import Script
from tests.rig import App, Connection, Reply, ask, chat, converse, request, stream

KEYS = [{"name": "ann", "key": "sk-ann"}, {"name": "bob", "key": "sk-bob"}]
WRONG = (("authorization", "Bearer no"),)
ANN = (("Authorization", "Bearer sk-ann"),)


@pytest.fixture
async def app(rig: Rig) -> App:
    await rig.node(models=["tiny", "org/name"])
    return await rig.router()


@pytest.fixture
async def locked(rig: Rig) -> App:
    await rig.node()
    return await rig.router(keys=KEYS)


def wrong(reply: Reply, status: int, code: str | None) -> dict[str, Any]:
    """Checks the one error shape and returns what stands in it."""
    assert reply.status == status, reply.body
    assert reply.header("content-type") == "application/json"
    assert named(reply)
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


def named(reply: Reply) -> bool:
    """Whether the answer has exactly one request id."""
    (value,) = reply.values("x-request-id")
    return value.startswith("req_") and len(value) == 36


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/"])
async def test_a_call_is_answered_under_every_spelling_of_its_path(app: App, path: str) -> None:
    reply = await ask(app.port, chat(), path)
    assert reply.status == 200
    assert named(reply)
    assert reply.header("content-length") == str(len(reply.body))
    assert reply.header("x-ebbtide-workload") == "interactive"
    assert reply.header("x-ebbtide-reason") == "default"
    assert reply.header("x-ebbtide-node") == "n1"
    assert (reply.header("x-ebbtide-queue-ms") or "").isdigit()


async def test_the_request_id_and_passing_headers_reach_the_node_and_credentials_do_not(rig: Rig, locked: App) -> None:
    sent = (*ANN, ("traceparent", "00-1"), ("Cookie", "a=b"), ("X-Request-Id", "mine"), ("OpenAI-Project", "p"))
    reply = await ask(locked.port, chat(), "/v1/chat/completions?a=1&b=%20", headers=sent)
    seen = rig.nodes[0].seen[0]
    assert seen.header("x-request-id") == reply.header("x-request-id")
    assert seen.header("traceparent") == "00-1"
    assert seen.query == "a=1&b=%20"
    for name in ("cookie", "authorization", "openai-project"):
        assert seen.header(name) is None


async def test_a_stream_has_the_headers_that_keep_it_flowing(app: App) -> None:
    reply = await ask(app.port, stream())
    assert reply.clean
    assert (reply.header("content-type") or "").startswith("text/event-stream")
    assert reply.header("cache-control") == "no-cache"
    assert reply.header("x-accel-buffering") == "no"
    assert reply.header("content-length") is None
    assert reply.data[-1] == b"[DONE]"
    assert named(reply)


@pytest.mark.parametrize(
    ("options", "status"),
    [({"headers": ANN}, 200), ({"headers": (*ANN, *ANN)}, 401), ({}, 401), ({"headers": (("api-key", "no"),)}, 401)],
)
async def test_who_has_no_key_is_told_so(locked: App, options: dict[str, Any], status: int) -> None:
    reply = await ask(locked.port, chat(), **options)
    assert reply.status == status
    if status == 401:
        wrong(reply, 401, "invalid_api_key")
        assert reply.header("www-authenticate") == "Bearer"


async def test_what_needs_a_key_and_what_does_not(locked: App) -> None:
    async def status(path: str) -> int:
        reply = await ask(locked.port, path=path, method="GET")
        assert named(reply)
        return reply.status

    assert [await status(path) for path in ("/healthz", "/health", "/livez", "/readyz", "/metrics", "/")] == [200] * 6
    assert [await status(path) for path in ("/v1/models", "/v1/models/tiny")] == [200] * 2
    assert await status("/v1/responses/x") == 401
    keyed = [(await ask(locked.port, path="/v1/models", method="GET", headers=key)).status for key in (ANN, WRONG)]
    assert keyed == [200, 401]


@pytest.mark.parametrize("path", ["/v1/models/org/name", "/v1/models/org%2Fname", "/models/org/name/"])
async def test_a_model_name_may_hold_slashes(app: App, path: str) -> None:
    reply = await ask(app.port, path=path, method="GET")
    assert reply.status == 200
    assert reply.json["id"] == "org/name"


async def test_models_are_listed(app: App) -> None:
    for path in ("/v1/models", "/v1/models/", "/models"):
        told = (await ask(app.port, path=path, method="GET")).json
        assert told["object"] == "list"
        for card in told["data"]:
            assert card["object"] == "model"
            assert isinstance(card["created"], int)
        assert {card["id"] for card in told["data"]} == {"tiny", "org/name"}
    wrong(await ask(app.port, path="/v1/models/none", method="GET"), 404, "model_not_found")


async def test_unknown_paths_and_methods(app: App) -> None:
    error = wrong(await ask(app.port, chat(), "/v1/pooling"), 404, "unknown_url")
    assert error["message"] == "Invalid URL (POST /v1/pooling)"
    reply = await ask(app.port, path="/v1/chat/completions", method="GET")
    wrong(reply, 405, "method_not_supported")
    assert reply.header("allow") == "POST"
    reply = await ask(app.port, {}, "/v1/models")
    wrong(reply, 405, "method_not_supported")
    assert set((reply.header("allow") or "").split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("path", ["/", "/v1/models", "/readyz", "/health", "/metrics"])
async def test_head_is_answered_wherever_get_is(app: App, path: str) -> None:
    reply = await ask(app.port, path=path, method="HEAD")
    assert (reply.status, reply.body) == (200, b"")
    assert named(reply)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", (), 400, None),
        (b"", (), 400, None),
        (b'{"messages":[]}', (), 400, "missing_required_parameter"),
        (chat(model="none"), (), 404, "model_not_found"),
        (chat(), (("Content-Type", "text/plain"),), 415, "unsupported_content_type"),
        (chat(), (("Content-Type", ""),), 415, "unsupported_content_type"),
        (chat(), (("Content-Type", "application/json"), ("Content-Encoding", "gzip")), 415, "unsupported_content_type"),
        (chat(), (("X-Ebbtide-Workload", "urgent"),), 400, "invalid_value"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    app: App, body: Any, headers: tuple[tuple[str, str], ...], status: int, code: str | None
) -> None:
    wrong(await ask(app.port, body, headers=headers), status, code)


async def test_a_charset_is_no_other_type(app: App) -> None:
    assert (await ask(app.port, chat(), headers=(("Content-Type", "Application/JSON; charset=UTF-8"),))).status == 200


async def test_a_chunked_body_is_read(app: App) -> None:
    raw = json.dumps(chat()).encode()
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (raw[:7], raw[7:])) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    assert (await converse(app.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces)).status == 200


async def test_the_error_of_a_node_is_told_in_the_callers_protocol(rig: Rig, app: App) -> None:
    rig.nodes[0].script = Script(status=400, message="no such field")
    told = await ask(app.port, {**chat(), "max_tokens": 5}, "/v1/messages")
    assert told.status == 400
    assert told.json["type"] == "error"
    assert told.json["error"]["type"] == "invalid_request_error"
    assert "no such field" in told.json["error"]["message"]
    told = await ask(app.port, {"messages": []}, "/v1/messages")
    assert (told.status, told.json["type"], told.json["error"]["type"]) == (400, "error", "invalid_request_error")


async def test_a_form_is_routed_by_its_model(rig: Rig, app: App) -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFFxx\r\n'
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--b--\r\n'
    )
    headers = (("Content-Type", "multipart/form-data; boundary=b"),)
    assert (await ask(app.port, form, "/v1/audio/transcriptions", headers=headers)).status == 200
    assert rig.nodes[0].bodies == [form]
    wrong(await ask(app.port, chat(), "/v1/audio/transcriptions"), 415, "unsupported_content_type")


async def test_a_body_over_the_limit_is_refused_before_it_is_read(rig: Rig) -> None:
    node = await rig.node()
    app = await rig.router(server={"request_body_bytes": 2048})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    async with await Connection.open(app.port) as line:
        await line.send(f"{head}Content-Length: 4096\r\nExpect: 100-continue\r\n\r\n".encode())
        reply = await line.reply()
        wrong(reply, 413, "payload_too_large")
        assert reply.header("connection") == "close"
    async with await Connection.open(app.port) as line:
        await line.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(3):
            await line.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        wrong(await line.reply(), 413, "payload_too_large")
        await line.send(b"400\r\n" + b" " * 1024 + b"\r\n0\r\n\r\n")
        assert await line.ended()
    assert (await ask(app.port, chat())).status == 200
    assert node.accepted == 1


async def test_a_body_that_is_waited_for_is_asked_for(app: App) -> None:
    raw = request("/v1/chat/completions", chat(), headers=(("Expect", "100-continue"),))
    head, _, body = raw.partition(b"\r\n\r\n")
    async with await Connection.open(app.port) as line:
        await line.send(head + b"\r\n\r\n")
        assert (await line.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await line.send(body)
        assert (await line.reply()).status == 200


async def test_one_connection_carries_many_requests(app: App) -> None:
    async with await Connection.open(app.port) as line:
        for body in (chat(), stream(), chat(model="none"), chat()):
            await line.send(request("/v1/chat/completions", body))
            reply = await line.reply()
            assert reply.clean
            assert reply.status == (404 if body["model"] == "none" else 200)


async def test_a_page_may_call_when_its_origin_is_named(rig: Rig) -> None:
    await rig.node()
    app = await rig.router(keys=KEYS, server={"cors_origins": ["https://chat.example.org"]})
    origin = ("Origin", "https://chat.example.org")
    wanted = "authorization,content-type,x-stainless-lang"
    preflight = (origin, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", wanted))
    reply = await ask(app.port, path="/v1/chat/completions", method="OPTIONS", headers=preflight)
    assert reply.status == 204
    assert named(reply)
    assert reply.header("access-control-allow-origin") == origin[1]
    assert reply.header("access-control-allow-headers") == wanted
    for body, headers, status in ((chat(), (), 401), (stream(), ANN, 200), (chat(model="x"), ANN, 404)):
        reply = await ask(app.port, body, headers=(origin, *headers))
        assert reply.status == status
        assert named(reply)
        assert reply.header("access-control-allow-origin") == origin[1]
        assert "x-request-id" in (reply.header("access-control-expose-headers") or "")
        assert "retry-after" in (reply.header("access-control-expose-headers") or "")
    other = await ask(app.port, chat(), headers=(("Origin", "https://evil.example"), *ANN))
    assert other.header("access-control-allow-origin") is None


async def test_without_origins_no_page_may_call(locked: App) -> None:
    preflight = (("Origin", "https://a.example"), ("Access-Control-Request-Method", "POST"))
    reply = await ask(locked.port, path="/v1/chat/completions", method="OPTIONS", headers=preflight)
    assert reply.status == 204
    assert reply.header("allow") == "POST"
    assert reply.header("access-control-allow-origin") is None


async def test_a_fault_of_ours_is_a_500_without_details(rig: Rig, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError("secret prompt")

    monkeypatch.setattr(app.inside.fleet, "contexts", broken)
    reply = await ask(app.port, chat())
    wrong(reply, 500, "internal_error")
    assert b"secret" not in reply.body
    monkeypatch.setattr(app.inside.fleet, "model_cards", broken)
    wrong(await ask(app.port, path="/v1/models", method="GET"), 500, "internal_error")


async def test_bodies_at_once_are_kept_apart(app: App) -> None:
    replies = await asyncio.gather(*(ask(app.port, stream("x" * number, max_tokens=3)) for number in range(1, 40)))
    assert all(reply.clean and reply.status == 200 for reply in replies)
    assert len({reply.header("x-request-id") for reply in replies}) == len(replies)
