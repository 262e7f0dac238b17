"""Responses that live on a node: every later word about one goes to that node, and only for its own caller."""

from typing import Any

import pytest

from tests.conftest import Rig
from tests.rig import App, Connection, ask, request

KEYS = [{"name": "ann", "key": "sk-ann"}, {"name": "bob", "key": "sk-bob"}]
ANN, BOB = ((("Authorization", f"Bearer sk-{name}"),) for name in ("ann", "bob"))
BODY = {"model": "tiny", "input": "hello", "max_output_tokens": 4}


@pytest.fixture
async def app(rig: Rig) -> App:
    for _ in range(3):
        await rig.node()
    return await rig.router(keys=KEYS)


async def create(app: App, **fields: Any) -> tuple[str, str]:
    """A new response of ann's: its id and its node."""
    reply = await ask(app.port, {**BODY, **fields}, "/v1/responses", headers=ANN)
    assert reply.status == 200, reply.body
    if fields.get("stream"):
        return reply.events[0].json["response"]["id"], reply.header("x-ebbtide-node") or ""
    return reply.json["id"], reply.header("x-ebbtide-node") or ""


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}], ids=["whole", "stream", "background"])
async def test_a_response_is_looked_at_on_its_own_node(rig: Rig, app: App, fields: dict[str, Any]) -> None:
    for _ in range(4):
        made, node = await create(app, **fields)
        reply = await ask(app.port, path=f"/v1/responses/{made}", method="GET", headers=ANN)
        assert (reply.status, reply.json["id"]) == (200, made)
        assert reply.header("x-ebbtide-node") == node
    assert app.held == 0


async def test_another_callers_response_and_an_unknown_one_are_the_same_404(app: App) -> None:
    made, _ = await create(app)
    for path, headers in (
        (f"/v1/responses/{made}", BOB),
        ("/v1/responses/resp_none", ANN),
        ("/v1/responses/a%0d", ANN),
    ):
        for method, action in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            body: Any = {} if method == "POST" else None
            reply = await ask(app.port, body, path + action, method=method, headers=headers)
            assert reply.status == 404
            assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", "response_id")


async def test_a_response_is_cancelled_and_deleted_where_it_is(rig: Rig, app: App) -> None:
    made, node = await create(app, background=True)
    path = f"/v1/responses/{made}"
    reply = await ask(app.port, b"", f"{path}/cancel", headers=ANN)
    assert (reply.status, reply.header("x-ebbtide-node")) == (200, node)
    seen = next(fake for fake in rig.nodes if fake.name == node).seen[-1]
    assert (seen.method, seen.path) == ("POST", f"{path}/cancel")
    await ask(app.port, path=path, method="DELETE", headers=ANN)
    assert (await ask(app.port, path=path, method="GET", headers=ANN)).status == 404


async def test_a_look_at_the_head_has_no_body_and_keeps_the_connection(app: App) -> None:
    made, _ = await create(app, background=True)
    whole = await ask(app.port, path=f"/v1/responses/{made}", method="GET", headers=ANN)
    async with await Connection.open(app.port) as line:
        for _ in range(2):
            await line.send(request(f"/v1/responses/{made}", method="HEAD", headers=ANN))
            reply = await line.reply("HEAD")
            assert (reply.status, reply.body) == (200, b"")
            assert reply.header("content-length") == whole.header("content-length")


async def test_a_query_goes_on(rig: Rig, app: App) -> None:
    made, node = await create(app, background=True)
    path = f"/v1/responses/{made}?stream=false&starting_after=7"
    await ask(app.port, path=path, method="GET", headers=ANN)
    seen = next(fake for fake in rig.nodes if fake.name == node).seen[-1]
    assert seen.query == "stream=false&starting_after=7"


async def test_what_continues_a_response_goes_to_its_node(app: App) -> None:
    made, node = await create(app)
    for _ in range(4):
        reply = await ask(app.port, {**BODY, "previous_response_id": made}, "/v1/responses", headers=ANN)
        assert (reply.status, reply.header("x-ebbtide-node")) == (200, node)
    for caller, previous in ((BOB, made), (ANN, "resp_none")):
        reply = await ask(app.port, {**BODY, "previous_response_id": previous}, "/v1/responses", headers=caller)
        assert (reply.status, reply.error["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize("tier", ["fast", "ultrafast"])
async def test_a_tier_the_node_refuses_becomes_one_it_knows(rig: Rig, app: App, tier: str) -> None:
    reply = await ask(app.port, {**BODY, "service_tier": tier}, "/v1/responses", headers=ANN)
    assert reply.status == 200
    assert reply.header("x-ebbtide-reason") == "tier"
    (seen,) = [seen for node in rig.nodes for seen in node.seen]
    assert seen.json["service_tier"] == "priority"


async def test_every_refusal_has_the_one_shape(app: App) -> None:
    reply = await ask(app.port, path="/v1/responses/resp_1", method="PUT", headers=ANN)
    assert (reply.status, reply.error["code"]) == (405, "method_not_supported")
    reply = await ask(app.port, path="/v1/responses/resp_1", method="GET")
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    reply = await ask(app.port, path="/v1/responses/resp_1/input_items", method="GET", headers=ANN)
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")
