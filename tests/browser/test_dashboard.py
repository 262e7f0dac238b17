"""The dashboard in a real browser: true numbers, losses told, crowds borne, keys kept, nothing foreign, for all."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.core.call import Outcome, Workload
from router.core.events import Topic
from tests.browser.chrome import Browser, Tab, found
from tests.browser.figures import of, within_bucket
from tests.browser.stage import MODEL, Stage
from tests.fakes import FakeNode, Script
from tests.jobs.desk import jsonl, line
from tests.rig import App, ask, entry, eventually, running_app, stream
from tests.rig.routers import free_port

PROGRAM = found()
AXE = Path(__file__).with_name("vendor") / "axe.min.js"
DRAWN = "document.querySelector('.plot canvas') !== null && document.body.dataset.live === 'live'"
LONG = "word " * 3000

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")


@asynccontextmanager
async def looking(browser: Browser, stage: Stage, width: int = 1280, **media: str) -> AsyncIterator[tuple[Tab, str]]:
    """A tab on a staged night, drawn; it must say nothing in its console and ask nobody else."""
    async with stage.open() as url, browser.tab(width, 900, **media) as tab:
        await tab.open(url)
        yield tab, url
        assert tab.said == []
        assert [one for one in tab.urls if not one.startswith(url)] == []


def night(**options: Any) -> Stage:
    stage = Stage(**options)
    stage.busy()
    return stage


# Numbers


async def facts(tab: Tab, card: str) -> dict[str, str]:
    """The evidence under one answer."""
    script = f"""Object.fromEntries([...document.querySelectorAll('#{card} .proof div')].map(
        (row) => [row.children[0].textContent, row.children[1].textContent]))"""
    return dict(await tab.run(script))


def shown(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    return int(found[1].replace(",", "")) if found else 0


async def load(app: App, nodes: list[Any]) -> list["asyncio.Task[Any]"]:
    """Chats that end, one of them badly; then five that stay on one node; the other takes one of three batch calls."""
    nodes[0].upcoming = [Script(status=500)]
    for _ in range(12):
        await ask(app.port, stream())
    for node in nodes:
        node.script = Script(ttft=60)
    asked = [asyncio.create_task(ask(app.port, stream())) for _ in range(5)]
    batch = (("X-Ebbtide-Workload", "batch"),)
    asked += [asyncio.create_task(ask(app.port, stream(LONG), headers=batch)) for _ in range(3)]
    await eventually(lambda: app.held == 6 and app.waiting == 2)
    return asked


async def test_numbers_are_those_of_the_metrics(rig, browser):
    nodes = [await rig.node("a"), await rig.node("b")]
    entries = [entry(nodes[0], pools=["interactive"]), entry(nodes[1], pools=["batch"], max_sequences=1)]
    app = await rig.router(*entries, upstream={"first_byte_s": 60, "idle_s": 60})
    asked = await load(app, nodes)
    async with browser.tab() as tab:
        await tab.open(f"{app.url}/dashboard")
        await tab.until("document.querySelector('#queue-2')?.textContent.includes('2 batch calls')")
        samples = await app.metrics()
        assert f"{of(samples, 'ebbtide_queue_calls', workload='batch'):.0f} batch calls" in await tab.text("#queue-2")
        ended = (await facts(tab, "chat"))["calls ended"]
        total = of(samples, "ebbtide_calls_total", workload="interactive")
        assert shown(ended, r"^([\d,]+),") == total == 12
        failed = [Outcome.FAILED, Outcome.REFUSED, Outcome.TIMED_OUT, Outcome.CUT]
        assert shown(ended, r"of which ([\d,]+)") == sum(
            of(samples, "ebbtide_calls_total", workload="interactive", outcome=one) for one in failed
        )
        for name, word, workload in (("a", "chat", "interactive"), ("b", "batch", "batch")):
            runs = await tab.text(f"[data-node={name}] .runs")
            running = of(samples, "ebbtide_node_running", node=name, workload=workload)
            assert shown(runs, rf"{word} (\d+) ") == running > 0
            room = await tab.run(f"document.querySelector('[data-node={name}] .bar').getAttribute('aria-label')")
            capacity = of(samples, "ebbtide_node_room_tokens", node=name, kind="capacity")
            assert f"of {capacity / 1000:.0f}\xa0k" in room
        waits = await tab.run("[...document.querySelectorAll('.why li')].map((li) => li.title.split(' ')[1])")
        assert [of(samples, "ebbtide_waiting_calls", reason=reason) for reason in waits] == [2]
        p50 = await tab.run("fetch('/dashboard/snapshot').then((r) => r.json()).then((s) => s.state.chat.ttft_p50_s)")
        assert within_bucket(samples, "ebbtide_time_to_first_token_seconds", 0.5, p50)
        assert tab.said == []
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_a_batch_is_told_as_the_api_tells_it(browser, tmp_path):
    bounds = {"first_byte_s": 60, "idle_s": 60}
    async with FakeNode(name="a") as node:
        node.on_request = lambda seen: Script(ttft=60) if b"line 5" in seen.body else None
        settings = {"nodes": [entry(node)], "upstream": bounds, "store": {"url": f"sqlite:///{tmp_path}/jobs.db"}}
        async with running_app(settings) as app, browser.tab() as tab:
            batch = await submit(app, [line(number) for number in range(6)])
            await tab.open(f"{app.url}/dashboard")
            done = f"document.querySelector('[data-batch={batch}] .parts')?.textContent.startsWith('5 of 6 lines')"
            await tab.until(done)
            counts = (await ask(app.port, path=f"/v1/batches/{batch}", method="GET")).json["request_counts"]
            assert counts == {"total": 6, "completed": 5, "failed": 0}
            await tab.click(f"[data-batch={batch}] button")
            told = await tab.until("document.querySelector('#lines[open] table')?.innerText")
            assert re.findall(r"(\w+)\t(\d+)", told) == [("done", "5"), ("running", "1")]
            assert tab.said == []


async def submit(app: App, lines: list[dict[str, Any]]) -> str:
    async with app.inside.batching.store.writing(
        caller="", purpose="batch", filename="in.jsonl", expires_s=None
    ) as writer:
        await writer.write(jsonl(lines))
    asked = {"input_file_id": writer.row.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str((await ask(app.port, json.dumps(asked).encode(), path="/v1/batches")).json["id"])


async def test_what_is_not_well_says_so_with_its_evidence_and_what_to_do(browser):
    stage = night()
    async with looking(browser, stage) as (tab, _):
        await tab.until(DRAWN)
        assert await tab.text("#fleet .todo") == (
            "To do (d): Start or mend it: it is let in by itself. The others carry its share until then. "
            "Runbook: EbbtideNodeDown."
        )
        assert await tab.run("document.querySelector('#chat .todo').hidden")
        ill = await tab.text("[data-node=b] .cause")
        assert re.fullmatch(r"memory growth with drift: .* ends; at its limit in 6\sh, degraded for 30\smin", ill)
        assert "37.7 GiB, +410.0 MiB/h" in await tab.text("[data-node=b] .trends")
        await tab.click("[data-node=b] summary")
        assert "rss_bytes_slope 410 MiB/h" in await tab.until(
            "document.querySelector('[data-node=b] details .hint').textContent"
        )
        assert await tab.run("document.querySelector('[data-node=a] .cause').hidden"), "steady is no warning"
        await tab.run(
            "Object.assign(document.getElementById('topic'), {value: 'take_back'}).dispatchEvent(new Event('change'))"
        )
        assert await tab.run("document.querySelectorAll('.events li').length") == 3
        for _ in range(60):
            stage.ended(Workload.INTERACTIVE, "a", 2.0, 10)
        assert "Runbook: EbbtideChatSlow" in await tab.until(
            "document.querySelector('#chat .todo:not([hidden])')?.textContent"
        )


# Losses


async def test_a_lost_router_is_told_greyed_and_found_again(browser):
    stage, port = night(), free_port()
    async with browser.tab() as tab:
        async with stage.open(port) as url:
            await tab.open(url)
            await tab.until(DRAWN)
            await tab.run("window.same = true")
            assert await tab.run("document.getElementById('lost').hidden")
        await tab.until("document.body.dataset.live === 'lost'")
        assert re.search(r"Router lost, last seen \d\d:\d\d:\d\d", await tab.text("#lost"))
        assert await tab.run("!document.getElementById('lost').hidden")
        assert "grayscale" in await tab.run("getComputedStyle(document.getElementById('board')).filter")
        assert await tab.text("#live-word") == "router lost"
        stage.events.add(Topic.OPERATOR, "while nobody looked")
        async with stage.open(port):
            await tab.until(
                "document.body.dataset.live === 'live' && document.getElementById('lost').hidden", within=15
            )
            assert await tab.run("getComputedStyle(document.getElementById('board')).filter") == "none"
            assert await tab.run("window.same"), "it came back without being loaded anew"
            assert "while nobody looked" in await tab.until("document.querySelector('.events li')?.textContent")
            assert await tab.text("#told") in ("The router is back.", "Chat: fine.")


# Crowds

COUNTING = """
window.changed = 0;
window.frames_ = 0;
new MutationObserver((all) => { window.changed += all.length; }).observe(document.getElementById('board'),
  { subtree: true, childList: true, characterData: true, attributes: true });
"""


async def test_two_hundred_nodes_and_five_hundred_batches_stay_small_on_the_page(browser):
    stage = night(nodes=200, batches=500)
    for index in range(500):
        stage.events.add(Topic.NODE, f"ready → down: try {index}", node="a")
    async with looking(browser, stage) as (tab, _):
        await tab.until(DRAWN)
        assert await tab.run("document.querySelectorAll('.node').length") == 12
        assert await tab.run("document.querySelectorAll('.batch').length") == 10
        assert "500" in await tab.text("#batches .pager")
        elements = await tab.run("document.getElementsByTagName('*').length")
        assert elements < 2500
        await tab.run(COUNTING)
        for turn in range(3):
            for node in stage.nodes:
                stage.hold(node, Workload.INTERACTIVE, 100 + turn, spoke=True)
            stage.ended(Workload.INTERACTIVE, "a", 0.05, 10)
            told = f"chat {4 + turn} ("
            await tab.until(
                f"[...document.querySelectorAll('.node .runs')].some((p) => p.textContent.includes('{told}'))"
            )
        assert await tab.run("window.changed") < 3 * 1500, "an update touches what is on the page, whatever there is"
        await tab.run(f"""(async () => {{
            const {{ apply, state }} = await import('{await tab.run("document.querySelector('[type=module]').src")}'
              .replace('app.js', 'state.js'));
            const many = {{}};
            for (let at = 1; at <= 10000; at++) many[at + 1000] = [1e9 + at, 'node', 'storm ' + at, 'a'];
            apply('change', {{ put: {{ events: many }} }});
            window.kept = state.events.length;
        }})()""")
        assert await tab.run("window.kept") == 10_000
        stage.events.add(Topic.NODE, "the last of all", node="b")
        await tab.until("document.querySelector('#events-count').textContent.includes('10,000')")
        assert await tab.run("document.querySelectorAll('.events li').length") == 25
        assert await tab.run("document.getElementsByTagName('*').length") < elements + 200
        await tab.click("#nodes .pager button:last-child")
        assert "13 to 24 of 200 nodes" in await tab.text("#nodes .pager")


# Keys and acts


async def give_key(tab: Tab, key: str) -> None:
    await tab.until("!document.getElementById('login').hidden && document.activeElement.id === 'key'")
    await tab.type(key)
    await tab.press("Enter")
    await tab.run("document.querySelector('#login button').click()")


async def test_an_administrator_acts_after_a_question_that_says_what_happens(browser):
    stage = night(keys=True)
    async with stage.open() as url, browser.tab() as tab:
        await tab.open(url)
        await give_key(tab, "key-of-nobody")
        await tab.until("document.getElementById('login-error').textContent.includes('Incorrect API key')")
        await give_key(tab, "key-of-ops")
        await tab.until(DRAWN)
        assert await tab.run("sessionStorage.getItem('ebbtide-key')") == "key-of-ops"
        batch = stage.lookout.overview.batches[0].id
        await tab.click(f"[data-batch={batch}] .danger")
        said = await tab.text("#ask")
        for told in (
            f"Cancel {batch}?",
            "4 lines that run",
            "184 lines that wait",
            "812 lines with an answer",
            "undone",
        ):
            assert told in said
        assert await tab.run("document.activeElement.id") == "ask-no"
        await tab.press("Escape")
        await tab.until("!document.getElementById('ask').open")
        assert stage.lookout.cancelled == []
        await tab.click(f"[data-batch={batch}] .danger")
        await tab.click("#ask-yes")
        await tab.until("!document.getElementById('ask').open")
        assert stage.lookout.cancelled == [batch]
        await tab.click("[data-node=a] .buttons button")
        assert "3 running chats will finish first" in await tab.text("#ask")
        await tab.click("#ask-yes")
        await tab.until("document.querySelector('.events').textContent.includes('ops asked to drain node a')")
        assert stage.operator.asked == [("drain", "a")]
        assert [one for one in tab.urls if "key-of" in one] == [], "a key is never in an address"


async def test_a_plain_key_looks_at_its_own_and_does_nothing(browser):
    stage = night(keys=True)
    async with stage.open() as url, browser.tab() as tab:
        await tab.open(url)
        await give_key(tab, "key-of-nightly")
        await tab.until(DRAWN)
        own = [row.id for row in stage.lookout.overview.batches if row.caller == "nightly"]
        assert await tab.run("[...document.querySelectorAll('.batch')].map((one) => one.dataset.batch)") == own
        assert await tab.run(
            "[...document.querySelectorAll('.danger, .node .buttons button')].every((b) => !b.checkVisibility())"
        )
        assert "admin: true" in await tab.text("#notice")
        await tab.click("#leave")
        await tab.until("!document.getElementById('login').hidden")
        assert await tab.run("sessionStorage.getItem('ebbtide-key')") is None
        assert await tab.run("!document.getElementById('board').checkVisibility()")


# The page itself


async def test_filters_narrow_and_stand_in_the_address(browser):
    async with looking(browser, night()) as (tab, url):
        await tab.until(DRAWN)
        chosen = "Object.assign(document.querySelector('[name=node]'), {value: 'b'})"
        await tab.run(f"{chosen}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        await tab.until("document.querySelectorAll('.node').length === 1")
        assert await tab.run("[location.search, document.querySelector('.node').dataset.node]") == ["?node=b", "b"]
        await tab.open(f"{url}?model={MODEL}&node=c")
        await tab.until("document.querySelector('.node')?.dataset.node === 'c'")
        assert await tab.run("document.querySelector('[name=node]').value") == "c"


async def test_the_policy_is_enforced(browser):
    async with night().open() as url, browser.tab() as tab:
        await tab.open(url)
        await tab.until(DRAWN)
        broken = await tab.run("""new Promise((done) => {
            const seen = new Set();
            addEventListener('securitypolicyviolation', (event) => {
              seen.add(event.effectiveDirective);
              if (seen.size === 3) done([...seen].sort());
            });
            const script = document.createElement('script');
            try { script.textContent = 'window.inline = true'; } catch {}
            document.body.append(script, Object.assign(new Image(), { src: 'http://other.example/a.png' }));
            fetch('http://other.example/').catch(() => {});
            setTimeout(() => done([...seen].sort()), 3000);
        })""")
        assert broken == ["connect-src", "img-src", "require-trusted-types-for"]
        assert await tab.run("window.inline === undefined")


async def test_what_is_empty_teaches(browser):
    async with looking(browser, Stage(nodes=0, batches=0)) as (tab, url):
        await tab.until(
            "document.body.dataset.live === 'live' && document.querySelector('#chat-word').textContent !== ''"
        )
        assert "url: http://127.0.0.1:8001" in await tab.text("#nodes pre")
        assert f"curl {url.removesuffix('/dashboard')}/v1/batches" in await tab.text("#batches pre")
        assert "on the relay" in await tab.text("#chat-word")


# Everybody


async def complaints(tab: Tab) -> list[str]:
    """What axe-core finds that is serious or worse."""
    await tab.run(AXE.read_text() + ";0")
    script = (
        "axe.run(document, {resultTypes: ['violations']}).then((r) => JSON.stringify([r.passes.length, r.violations]))"
    )
    looked, found = json.loads(await tab.run(script))
    assert looked > 15, "it looked"
    grave = [one for one in found if one["impact"] in ("serious", "critical")]
    return [
        f"{one['id']}: {[node['target'] for node in one['nodes']][:5]} {one['nodes'][0]['failureSummary']}"
        for one in grave
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(browser, scheme):
    async with looking(browser, night(keys=False), prefers_color_scheme=scheme) as (tab, _):
        await tab.until(DRAWN)
        await tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        await tab.until("document.querySelector('.node tbody tr') !== null")
        assert await complaints(tab) == []


async def test_a_narrow_phone_reads_it_all(browser):
    async with night(keys=True).open() as url, browser.tab(320, 640) as tab:
        await tab.open(url)
        await tab.until("!document.getElementById('login').hidden")
        assert await complaints(tab) == []
        await give_key(tab, "key-of-ops")
        await tab.until(DRAWN)
        assert await tab.run("document.documentElement.scrollWidth") <= 320
        wide = "one.getBoundingClientRect().right > 321 && !one.closest('pre, .scroll')"
        assert await tab.run(f"[...document.querySelectorAll('#board *')].filter((one) => {wide}).length") == 0
        await tab.click(".batch .danger")
        assert await complaints(tab) == []
