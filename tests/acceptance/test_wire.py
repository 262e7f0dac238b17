"""The checks that need exact bytes, exact times or a rude client: raw sockets against the real router."""

import asyncio
import json
from time import monotonic
from typing import Any

import pytest

from tests.acceptance.world import HEAD_S, HEARTBEAT_S, KEY, NODE_KEY, ORIGIN, RELAY_KEY, STALL_S, World
from tests.rig import Connection, Reply, ask, chat, eventually, request, stream

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
CHAT = "/v1/chat/completions"
AUTH = (("Authorization", f"Bearer {KEY}"),)
HOP_BY_HOP = ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade")


async def call(world: World, body: Any = None, path: str = CHAT, *, headers: Any = (), **options: Any) -> Reply:
    return await ask(world.router.port, body, path, headers=(*AUTH, *headers), **options)


@pytest.mark.check("C5")
async def test_json_says_it_is_json(world):
    replies = [
        await call(world, chat()),
        await call(world, path="/v1/models", method="GET"),
        await call(world, chat(model="nope")),
    ]
    assert {(reply.header("content-type") or "").partition(";")[0] for reply in replies} == {"application/json"}


@pytest.mark.check("C6")
@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/readyz", "/metrics", "/v1/nope", CHAT])
async def test_every_answer_has_one_id(world, path):
    assert (await call(world, path=path, method="GET")).header("x-request-id")


@pytest.mark.check("C7")
async def test_the_id_is_the_one_the_node_got(world):
    for body in (chat(user="c7"), stream(user="c7")):
        reply = await call(world, body)
        assert world.seen("c7")[-1].header("x-request-id") == reply.header("x-request-id")


@pytest.mark.check("C9")
async def test_the_callers_key_stays_here(world):
    await call(world, chat(user="c9"), headers=(("Cookie", "a=b"), ("X-Api-Key", KEY)))
    await call(world, chat(model="relayed-plain", user="c9"), headers=(("Proxy-Authorization", "Basic x"),))
    node, relay = world.seen("c9")
    assert node.header("authorization") == f"Bearer {NODE_KEY}"
    assert relay.header("authorization") == f"Bearer {RELAY_KEY}"
    for seen in (node, relay):
        assert KEY not in str(seen.headers)
        assert not [name for name in ("cookie", "x-api-key", "proxy-authorization") if seen.header_values(name)]


@pytest.mark.check("C10")
async def test_hop_by_hop_headers_end_here(world):
    hops = (("Connection", "close, X-Hop"), ("X-Hop", "1"), ("TE", "trailers"), ("Keep-Alive", "timeout=9"))
    reply = await call(world, chat(model="hops", user="c10"), headers=hops)
    assert reply.status == 200
    (seen,) = world.seen("c10")
    assert not seen.header_values("x-hop")
    assert not [name for name in (*HOP_BY_HOP, "expect") if name != "connection" and seen.header_values(name)]
    assert "x-named" not in str(seen.header_values("connection"))
    assert not reply.values("x-named")
    assert not reply.values("keep-alive")
    assert not reply.values("set-cookie")
    assert len(reply.values("date")) <= 1
    assert len(reply.values("content-length") + reply.values("transfer-encoding")) == 1


@pytest.mark.check("C11")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        ("/v1/completions", {"model": "tiny", "prompt": "x"}),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}),
        ("/v1/responses", {"model": "tiny", "input": "x"}),
        ("/tokenize", {"model": "tiny", "prompt": "x"}),
    ],
)
async def test_a_chunked_request_is_accepted(world, path, body):
    raw = json.dumps(body).encode()
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (raw[:7], raw[7:]))
    reply = await call(world, pieces + b"0\r\n\r\n", path, headers=(("Transfer-Encoding", "chunked"),))
    assert reply.status == 200


@pytest.mark.check("C12")
async def test_expect_is_answered_at_once(world):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 450_000}}
    raw = request(CHAT, chat([picture]), headers=(*AUTH, ("Expect", "100-continue")))
    head, _, body = raw.partition(b"\r\n\r\n")
    began = monotonic()
    async with await Connection.open(world.router.port) as line:
        await line.send(head + b"\r\n\r\n")
        assert (await line.read()).startswith(b"HTTP/1.1 100 ")
        await line.send(body)
        reply = await line.reply()
    assert reply.status == 200
    assert monotonic() - began < 2


@pytest.mark.check("C13")
async def test_a_preflight_needs_no_key(world):
    asked = "authorization,content-type,x-stainless-lang"
    headers = (
        ("Origin", ORIGIN),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", asked),
    )
    reply = await ask(world.router.port, path=CHAT, method="OPTIONS", headers=headers)
    assert reply.status in (200, 204)
    allowed = (reply.header("access-control-allow-headers") or "").lower()
    assert all(name in allowed for name in asked.split(","))
    answer = await call(world, chat(), headers=(("Origin", ORIGIN),))
    exposed = (answer.header("access-control-expose-headers") or "").lower()
    assert "x-request-id" in exposed
    assert "retry-after" in exposed
    refused = await ask(world.router.port, chat(), headers=(("Origin", ORIGIN),))
    assert (refused.status, refused.header("access-control-allow-origin")) == (401, ORIGIN)


@pytest.mark.check("C14")
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/healthz", "/readyz", "/"])
async def test_head_is_get_without_a_body(world, path):
    reply = await call(world, path=path, method="HEAD")
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.check("C15")
async def test_a_trailing_slash_changes_nothing(world):
    plain, slashed = [await call(world, path=path, method="GET") for path in ("/v1/models", "/v1/models/")]
    assert (plain.status, slashed.status) == (200, 200)
    assert plain.json == slashed.json
    assert (await call(world, chat(), f"{CHAT}/")).status == 200


@pytest.mark.check("C4")
async def test_a_name_with_a_slash_both_ways(world):
    for path in ("/v1/models/org%2Fname", "/v1/models/org/name"):
        assert (await call(world, path=path, method="GET")).json["id"] == "org/name"


@pytest.mark.check("C17")
async def test_sixty_kib_of_headers_and_no_more(world):
    def padding(size):
        return tuple((f"X-Pad-{index}", "x" * 4000) for index in range(size // 4000))

    assert (await call(world, chat(), headers=padding(60_000))).status == 200
    reply = await call(world, chat(), headers=padding(80_000))
    assert reply.status in (400, 431)
    assert (await call(world, chat())).status == 200


@pytest.mark.check("C23")
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_caller_that_leaves_frees_the_node(world, streamed):
    user = f"c23-{streamed}"
    line = await Connection.open(world.router.port)
    await line.send(request(CHAT, chat(model="endless", user=user, stream=streamed), headers=AUTH))
    (seen,) = await eventually(lambda: world.seen(user))
    if streamed:
        await line.read_until(b"tok1")
    left = monotonic()
    line.reset()
    await eventually(lambda: seen.outcome == "aborted", within=1)
    assert seen.ended - left < 1


@pytest.mark.check("C24")
async def test_a_call_is_answered_before_the_clients_own_limit(world):
    began = monotonic()
    reply = await call(world, chat(model="never"))
    assert HEAD_S - 0.2 < monotonic() - began < HEAD_S + 1
    assert reply.status in (503, 504)
    assert reply.header("x-should-retry") == "false"


@pytest.mark.check("C25")
@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_both_ways(world, prefix):
    assert (await call(world, {"model": "tiny", "prompt": "hello there"}, f"{prefix}/tokenize")).json["count"] == 2
    assert (await call(world, {"model": "tiny", "tokens": [1, 2]}, f"{prefix}/detokenize")).json["prompt"] == "1 2"


@pytest.mark.check("C26")
@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"])
async def test_scoring_paths(world, path):
    body = {"model": "tiny", "query": "q", "documents": ["a", "b"], "text_1": "a", "text_2": ["b", "c"]}
    answer = (await call(world, body, path)).json
    assert len(answer.get("results") or answer["data"]) == 2


@pytest.mark.check("C30")
@pytest.mark.parametrize("model_first", [True, False])
async def test_the_model_field_may_stand_anywhere(world, model_first):
    field = '--B\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
    sound = '--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    parts = [field, sound + "RIFF" * 2000 + "\r\n"]
    body = "".join(parts if model_first else reversed(parts)) + "--B--\r\n"
    kind = (("Content-Type", "multipart/form-data; boundary=B"),)
    reply = await call(world, body.encode(), "/v1/audio/transcriptions", headers=kind)
    assert reply.json == {"text": "what was said"}


@pytest.mark.check("C31")
async def test_each_event_is_passed_on_as_it_comes(world):
    reply = await call(world, stream(model="paced", user="c31"))
    sent = world.seen("c31")[0].sent
    arrived = [event.at for event in reply.events if b"tok" in event.data]
    late = sorted(at - when for when, at in zip(sent, arrived, strict=True))
    assert late[len(late) // 2] < 0.02
    assert all(at < following for at, following in zip(arrived, sent[1:], strict=False)), "none waits for the next"
    assert (reply.header("x-accel-buffering"), reply.header("cache-control")) == ("no", "no-cache")


@pytest.mark.check("C32")
async def test_done_is_exact_and_last(world):
    began = monotonic()
    reply = await call(world, stream(model="linger"))
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert monotonic() - began < 0.5


@pytest.mark.check("C34")
@pytest.mark.check("C33")
@pytest.mark.parametrize("model", ["cut", "reset", "cut-inside"])
async def test_a_cut_leaves_whole_events_and_an_error(world, model):
    reply = await call(world, stream(model=model))
    assert reply.text == "tok0 tok1 tok2"
    *events, error, done = reply.data
    assert all(json.loads(event)["choices"] for event in events)
    said = json.loads(error)["error"]
    assert (said["type"], said["code"], said["param"]) == ("server_error", "upstream_error", None)
    assert done == b"[DONE]"


@pytest.mark.check("C35")
async def test_comments_come_while_waiting(world):
    began = monotonic()
    reply = await call(world, stream(model="slow"))
    comments = [event for event in reply.events if event.comment]
    assert len(comments) >= 2
    assert comments[0].at - began < HEARTBEAT_S + 0.3
    assert all(event.raw.startswith(b":") for event in comments)
    assert reply.text == "tok0 tok1 tok2 tok3 tok4"


@pytest.mark.check("C36")
async def test_only_data_and_comments_pass(world):
    reply = await call(world, stream(model="dirty"))
    lines = [line for event in reply.events for line in event.lines]
    assert all(line.startswith((b"data: ", b":")) for line in lines), lines
    assert reply.text == "clean text"


@pytest.mark.check("C42")
async def test_a_broken_responses_stream_says_so(world):
    reply = await call(world, {"model": "cut", "input": "x", "stream": True}, "/v1/responses")
    error = next(event for event in reply.events if b"event: error" in event.raw)
    said = error.json
    assert said["type"] == "error"
    assert {"code", "message", "param", "sequence_number"} <= set(said)
    assert "error" not in said
    last = reply.events[-1].json
    assert (last["type"], last["response"]["id"]) == ("response.failed", reply.events[0].json["response"]["id"])


@pytest.mark.check("C44")
async def test_a_client_that_stops_reading_is_let_go(world):
    async with await Connection.open(world.router.port, receive_buffer=4096) as line:
        await line.send(request(CHAT, stream(model="flood", user="c44"), headers=AUTH))
        (seen,) = await eventually(lambda: world.seen("c44"))
        await eventually(lambda: seen.outcome == "aborted", within=STALL_S + 3)
        assert seen.pushed < 32 * 2**20


@pytest.mark.check("C45")
async def test_anthropic_events_pass_untouched(world):
    headers = (("anthropic-version", "2026-10-21"),)
    reply = await call(
        world, {"model": "tiny", "max_tokens": 5, "messages": [], "stream": True}, "/v1/messages", headers=headers
    )
    kinds = [event.json["type"] for event in reply.events]
    assert "ping" in kinds
    assert all(event.lines[0] == b"event: " + event.json["type"].encode() for event in reply.events)


WRONG = {
    "not JSON": (400, CHAT, b"{", {}),
    "not an object": (400, CHAT, b"[]", {}),
    "no model": (400, CHAT, {"messages": []}, {}),
    "unknown model": (404, CHAT, {"model": "nope", "messages": []}, {}),
    "unknown path": (404, "/v1/nope", {}, {}),
    "wrong method": (405, CHAT, None, {"method": "GET"}),
    "wrong type": (415, CHAT, b"x", {"headers": (("Content-Type", "text/plain"),)}),
    "refused by the node": (400, CHAT, chat(model="refused"), {}),
    "flat": (400, CHAT, chat(model="flat"), {}),
    "detail": (404, CHAT, chat(model="detail"), {}),
    "string": (400, CHAT, chat(model="string"), {}),
    "html": (400, CHAT, chat(model="html"), {}),
    "too long": (400, CHAT, chat("word " * 500, model="short"), {}),
    "quota": (429, CHAT, chat(model="quota"), {}),
    "not implemented": (501, CHAT, chat(model="unimplemented"), {}),
    "unknown response": (404, "/v1/responses/resp_x", None, {"method": "GET"}),
}


@pytest.mark.check("C46")
@pytest.mark.check("C55")
@pytest.mark.check("C51")
@pytest.mark.parametrize("name", WRONG)
async def test_every_error_has_the_one_shape(world, name):
    status, path, body, options = WRONG[name]
    reply = await call(world, body, path, **options)
    assert reply.status == status, reply.body
    assert set(reply.json) == {"error"}
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)
    if status == 405:
        assert "POST" in (reply.header("allow") or "")


@pytest.mark.check("C46")
async def test_a_missing_key_has_it_too(world):
    reply = await ask(world.router.port, chat())
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert "Bearer" in (reply.header("www-authenticate") or "")


@pytest.mark.check("C49")
async def test_the_routers_own_refusal_reads_like_the_engines(world):
    reply = await call(world, chat("word " * 500, model="short"))
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["message"].startswith("This model's maximum context length is 64 tokens")
    assert not world.seen("c49")


@pytest.mark.check("C52")
async def test_a_full_router_says_when_to_come_back(world):
    holder = asyncio.create_task(call(world, chat(model="narrow", user="c52-holder")))
    await eventually(lambda: world.seen("c52-holder"))
    refused = await call(world, chat(model="narrow", user="c52"))
    assert (refused.status, refused.error["code"]) == (503, "server_is_overloaded")
    assert 1 <= int(refused.header("retry-after") or 0) <= 60
    assert (await holder).status == 200


@pytest.mark.check("C53")
@pytest.mark.parametrize("model", ["quota", "unimplemented"])
async def test_what_cannot_succeed_says_so(world, model):
    assert (await call(world, chat(model=model))).header("x-should-retry") == "false"


@pytest.mark.check("C21")
async def test_fast_becomes_priority_on_responses(world):
    reply = await call(world, {"model": "tiny", "input": "c21", "user": "c21", "service_tier": "fast"}, "/v1/responses")
    assert reply.status == 200
    assert world.seen("c21")[0].json["service_tier"] == "priority"


@pytest.mark.check("C40")
async def test_after_the_first_byte_nothing_is_tried_elsewhere(world):
    before = world.b.accepted
    reply = await call(world, stream(model="pair", user="c40"))
    assert reply.text == "tok0 tok1 tok2 tok3 tok4"
    assert world.b.accepted == before + 1
    cut = await call(world, stream(model="pair-cut", user="c40-cut"))
    assert json.loads(cut.data[-2])["error"]["code"] == "upstream_error"
    assert len(world.seen("c40-cut")) == 1
