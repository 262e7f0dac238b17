"""What a scrape shows of batches: as the store said last, never by asking it."""

from types import SimpleNamespace

from router.core.job import BatchState
from router.jobs.gauges import Gauges
from router.jobs.store import Event, StoreUsage
from router.jobs.store.measures import Act, Measures
from tests.fakes import FakeNode, Script
from tests.jobs.desk import jsonl, line
from tests.rig import ask, entry, eventually, running_app

USAGE = StoreUsage(
    files=3,
    file_bytes=4096,
    batches=2,
    queued=7,
    running=2,
    disk_bytes=65536,
    states={"in_progress": 2},
    models={"tiny": 5, "stranger": 1, "odd": 2, None: 4},
    oldest_s=90.0,
)


def gauges():
    runner = SimpleNamespace(ended={"done": 4, "returned": 1}, taken=9, held={}, trouble=None)
    return Gauges(SimpleNamespace(measures=Measures(), usage=None), runner, "tiny".__eq__)


def shown(gauges):
    return {(family.name.removeprefix("ebbtide_"), *labels): value
            for family in gauges.families() for labels, value in family.values.items()}  # fmt: skip


def test_before_the_store_was_asked_nothing_is_said_of_it():
    found = shown(gauges())
    assert found["batch_lines_taken",] == 9
    assert (found["batch_tries", "done"], found["batch_tries", "returned"]) == (4, 1)
    assert not {"batches", "batch_lines", "batch_oldest_seconds", "store_files", "store_disk_bytes"} & {
        name for name, *_ in found
    }


def test_what_the_store_said_and_strangers_as_one():
    page = gauges()
    page.usage = USAGE
    page.ended(
        Event(
            batch_id="b", caller="ann", state=BatchState.COMPLETED, total=1, completed=1, failed=0, seconds=1.0
        )
    )  # fmt: skip
    for _ in range(2):
        found = shown(page)
        assert (found["batches", "in_progress"], found["batches_ended", "completed"]) == (2, 1)
        assert (found["batch_lines", "queued"], found["batch_lines", "running"]) == (7, 2)
        assert {key[1]: value for key, value in found.items() if key[0] == "batch_lines_left"} == {
            "tiny": 5, "other": 3, "several": 4,
        }  # fmt: skip
        assert (found["batch_oldest_seconds",], found["store_disk_bytes",]) == (90, 65536)
        assert (found["store_files",], found["store_file_bytes",]) == (3, 4096)


async def test_a_router_shows_its_batches(tmp_path):
    told = {"store": {"url": f"sqlite:///{tmp_path}/e.db"}}
    async with (
        FakeNode(script=Script(ttft=300), slots=2) as node,
        running_app(told | {"nodes": [entry(node)]}) as app,
    ):
        batching = app.inside.batching
        await submit(app, batching.store, 5)
        await eventually(lambda: node.inflight >= 1 and len(batching.runner.held) == 5, within=5)
        batching._gauges.usage = await batching.store.usage()
        found = await app.metrics()
        assert found['ebbtide_batches{status="in_progress"}'] == 1
        assert found['ebbtide_batch_lines_left{model="tiny"}'] == 5
        assert found["ebbtide_batch_lines_taken_total"] == 5
        assert sum(found[f'ebbtide_batch_lines_held{{state="{state}"}}'] for state in ("begun", "ready")) == 5
        assert found["ebbtide_batch_trouble"] == 0
        for act in (Act.SELECT, Act.INSERT, Act.UPDATE, Act.COMMIT, Act.TURN):
            assert found[f'ebbtide_store_seconds_count{{act="{act}"}}'] > 0


async def submit(app, store, lines):
    async with store.writing(caller="", purpose="batch", filename="in.jsonl", expires_s=None) as writer:
        await writer.write(jsonl(line(number) for number in range(lines)))
    told = {"input_file_id": writer.row.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return (await ask(app.port, told, "/v1/batches")).json
