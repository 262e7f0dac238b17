"""A router that has no file descriptor left: nobody else is charged with it."""

import pytest

from tests.rig import Connection, chat, request, stream
from tests.rig.descriptors import no_descriptors

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("body", [chat(), stream()])
async def test_its_own_lack_is_a_503_with_retry_after_and_the_node_keeps_its_state(rig, body):
    await rig.node(dialect="openai")
    app = await rig.router(probe={"every_s": 60})
    node = app.nodes[0]
    before = (node.state, node.faults, node.failed_at)
    async with await Connection.open(app.port) as line:
        with no_descriptors():
            for _ in range(4):
                await line.send(request(CHAT, body))
                reply = await line.reply()
                assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")
                assert (reply.header("retry-after"), app.held) == ("1", 0)
        assert (node.state, node.faults, node.failed_at) == before
        await line.send(request(CHAT, body))
        assert (await line.reply()).status == 200
