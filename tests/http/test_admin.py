"""The operator's door: who is let in, what is refused, and the command line that uses it."""

import asyncio
import json
import sys

import pytest

from tests.rig import ask, entry, eventually
from tests.rig.recycling import act, care

KEYS = [{"name": "boss", "key": "boss-key", "admin": True}, {"name": "ui", "key": "ui-key"}]


def bearer(key):
    return (("Authorization", f"Bearer {key}"),)


async def nodes(app, *headers):
    return await ask(app.port, path="/admin/nodes", method="GET", headers=headers)


async def test_only_a_key_with_admin_is_let_in(rig):
    await rig.node()
    app = await rig.router(keys=KEYS)
    assert (await nodes(app, *bearer("boss-key"))).status == 200
    refused = await nodes(app, *bearer("ui-key"))
    assert (refused.status, refused.error["code"]) == (403, "permission_denied")
    assert (await nodes(app)).error["code"] == "invalid_api_key"
    assert (await nodes(app)).status == 401
    assert (await act(app, "n1", "drain", headers=bearer("ui-key"))).status == 403
    assert str(app.node("n1").state) == "ready"
    assert (await act(app, "n1", "drain", headers=bearer("boss-key"))).status == 200


async def test_without_keys_this_machine_may_and_no_web_page(rig):
    await rig.node()
    app = await rig.router()
    assert (await nodes(app)).status == 200
    page = (("Origin", "http://evil.example"),)
    assert (await nodes(app, *page)).status == 403
    assert (await act(app, "n1", "drain", headers=page)).error["code"] == "permission_denied"
    assert str(app.node("n1").state) == "ready"


async def test_without_keys_on_a_public_address_nobody_may(rig):
    await rig.node()
    app = await rig.router(server={"host": "0.0.0.0", "allow_public_without_keys": True})
    assert (await nodes(app)).status == 403
    assert (await act(app, "n1", "drain")).status == 403


async def test_a_row_tells_how_a_node_stands_and_since_when(rig):
    await rig.node()
    app = await rig.router()
    [row] = (await nodes(app)).json["data"]
    assert (row["name"], row["state"], row["models"], row["running"]) == ("n1", "ready", ["tiny"], 0)
    assert row["cause"] == "a look was answered"
    assert 0 <= row["state_s"] < 60
    assert (row["diagnosis"], row["recycle_due"], row["last_recycle"]) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "what", "status", "code"),
    [
        ("nobody", "drain", 404, "node_not_found"),
        ("nobody", "resume", 404, "node_not_found"),
        ("nobody", "recycle", 404, "node_not_found"),
        ("n1", "resume", 409, "node_not_drained"),
        ("n1", "recycle", 409, "no_recycle_hook"),
        ("n1", "explode", 404, "unknown_url"),
    ],
)
async def test_what_cannot_be_done_is_told_in_openais_shape(rig, name, what, status, code):
    await rig.node()
    app = await rig.router()
    reply = await act(app, name, what)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert set(reply.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"{", b'{"force": "yes"}', b"x" * 5000], ids=["half", "a word", "too long"])
async def test_a_body_that_cannot_be_read_starts_nothing(rig, tmp_path, body):
    await rig.node(), await rig.node()
    app = await rig.router(**care(tmp_path / "hook.log"))
    assert (await act(app, "n1", "recycle", body)).status == 400
    assert str(app.node("n1").state) == "ready"


async def test_a_second_recycle_of_the_same_node_is_refused(rig, tmp_path):
    await rig.node(), await rig.node()
    app = await rig.router(**care(tmp_path / "hook.log", command=["/bin/sleep", "2"], hook_s=0.5))
    assert (await act(app, "n1", "recycle")).status == 202
    assert (await act(app, "n1", "recycle")).error["code"] == "node_is_recycled"
    await eventually(lambda: str(app.node("n1").state) == "recycling")
    for what in ("drain", "resume"):
        assert (await act(app, "n1", what)).status == 409
    await eventually(lambda: "n1" in app.inside.caring.recycling.records)


# the command line


async def command(app, *words, env=None):
    arguments = [sys.executable, "-m", "router", "node", *words, "--url", f"{app.url}/v1"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*arguments, stdout=pipe, stderr=pipe, env=env)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_line_drains_and_resumes(rig):
    await rig.node()
    app = await rig.router(keys=KEYS)
    status, out, _ = await command(app, "drain", "n1", "--wait", "--json", "--key", "boss-key")
    assert (status, json.loads(out)[0]["state"]) == (0, "draining")
    status, out, _ = await command(app, "list", "--key", "boss-key")
    assert (status, "draining" in out, "drained by the operator" in out) == (0, True, True)
    status, _, err = await command(app, "resume", "n1", "--key", "ui-key")
    assert (status, "admin: true" in err) == (1, True)
    assert (await command(app, "resume", "n1", "--key", "boss-key"))[0] == 0
    status, _, err = await command(app, "drain")
    assert (status, "which node?" in err) == (1, True)


async def test_moves_and_stays_are_counted_and_go_with_the_node(rig):
    one, two = await rig.node(), await rig.node()
    app = await rig.router(one, two)
    await act(app, "n1", "drain")
    await act(app, "n1", "resume")
    await act(app, "n1", "drain")
    found = await app.metrics()
    told = {name: value for name, value in found.items() if "transitions_total" in name and 'node="n1"' in name}
    assert told == {
        f'ebbtide_node_transitions_total{{cause="{cause}",from="{before}",node="n1",to="{after}"}}': count
        for before, after, cause, count in (
            ("starting", "ready", "probed", 1),
            ("ready", "draining", "drain", 1),
            ("draining", "probation", "resume", 1),
            ("probation", "draining", "drain", 1),
        )
    }
    stays = {name: value for name, value in found.items() if "state_seconds_total" in name and 'node="n1"' in name}
    assert set(stays) == {
        f'ebbtide_node_state_seconds_total{{node="n1",state="{state}"}}'
        for state in ("starting", "ready", "draining", "probation")
    }
    row = next(row for row in (await nodes(app)).json["data"] if row["name"] == "n1")
    assert row["state_s"] <= sum(stays.values()) + 1
    later = await app.metrics()
    here = 'ebbtide_node_state_seconds_total{node="n1",state="draining"}'
    assert later[here] > found[here], "the stay that goes on counts"
    await app.reload({"nodes": [entry(two)]})
    await eventually(lambda: not app.inside.roster.leaving)
    assert not [name for name in await app.metrics() if 'node="n1"' in name]
