"""Lines of a batch whose window is about to close are not taken back."""

from router.core.lateness import LateTerms
from router.jobs.hurry import Hurry
from tests.fakes import Script
from tests.jobs.desk import line, room
from tests.rig import ask, chat, eventually

LONG = "word " * 2000


async def test_a_line_of_a_late_batch_is_left_where_it_is(rig, tmp_path):
    node = await rig.node()
    node.on_request = lambda seen: Script(ttft=0.5, n=3) if len(seen.body) > 5000 else Script(n=3)
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit([line(1, messages=[{"role": "user", "content": LONG}])], window_s=600)
        await eventually(lambda: node.inflight == 1, within=5)
        hurry = Hurry(store=jobs.store, runner=jobs.runner)
        await hurry.look()
        assert not any(held.past.urgent for held in jobs.runner.held.values()), "there are ten minutes left"
        hurry.terms = LateTerms(last_share=1.0, within_s=1000)
        await hurry.look()
        assert (await ask(app.port, chat())).status == 200
        results = await jobs.drained(batch)
    assert results.batch.completed == 1
    assert (node.aborted, len(node.seen)) == ([], 2)
