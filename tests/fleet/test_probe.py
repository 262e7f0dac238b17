"""One look at one node, over real sockets."""

import asyncio
from time import monotonic

import pytest

from router.core.node import Load, Spec
from router.errors import ProbeFailed
from router.fleet.probe import Look, refused
from tests.fakes import FakeNode
from tests.fleet.looking import BOTH, probing, raw_server, spec

ENGINES = ("vllm", "sglang", "llamacpp", "ollama", "openai")
GENERATING = {"/health_generate", "/generate", "/v1/completions", "/v1/chat/completions"}


async def look_at(fake: FakeNode, *, timeout_s: float = 1.0, key: str | None = None, **fields: object) -> Look:
    it = spec(fake, **fields)
    async with probing([it], timeout_s=timeout_s, key=key) as probe:
        return await probe.look(it)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("said", ["auto", "named"])
async def test_every_engine_is_recognised_and_read(engine: str, said: str) -> None:
    async with FakeNode(models=["tiny", "small"], dialect=engine, context=2048, kv_tokens=8192, slots=3) as fake:
        fake.kv_usage = 0.25
        look = await look_at(fake, engine="auto" if said == "auto" else engine)
    assert look.sure
    assert look.facts.engine == engine
    assert list(look.facts.models) == ["tiny", "small"]
    assert look.facts.models["tiny"].context == (None if engine == "openai" else 2048)
    assert look.facts.tokens == {"vllm": 8192, "sglang": 8192, "llamacpp": 6144}.get(engine)
    assert look.facts.sequences == {"sglang": 3, "llamacpp": 3}.get(engine)
    assert look.facts.streams_usage is (engine != "openai")
    assert look.load.running == (None if engine in ("ollama", "openai") else 0)
    assert look.load.used == {"vllm": 0.25, "sglang": 0.25, "llamacpp": 0.0}.get(engine)
    assert fake.accepted == 0
    assert {seen.method for seen in fake.probes} == {"GET"}
    assert not GENERATING & {seen.path for seen in fake.probes}
    assert not fake.faults


async def test_sglang_health_generates_a_token_and_is_not_read() -> None:
    async with FakeNode(dialect="sglang") as fake:
        await look_at(fake)
        assert not [seen.path for seen in fake.probes if seen.path.startswith("/health")]


async def test_a_later_look_reads_the_load_alone() -> None:
    async with FakeNode() as fake:
        it = spec(fake)
        async with probing([it]) as probe:
            first = await probe.look(it)
            fake.forget()
            fake.kv_usage = 0.5
            second = await probe.look(it, engine=first.facts.engine, facts=first.facts)
        assert {seen.path for seen in fake.probes} == {"/health", "/metrics"}
    assert second.facts is first.facts
    assert second.load.used == 0.5


@pytest.mark.parametrize("metrics", [500, 404, 401, "", "not { prometheus\n\x00", "vllm:num_requests_running oops\n"])
async def test_metrics_that_are_missing_leave_the_load_unknown(metrics: str | int) -> None:
    async with FakeNode() as fake:
        fake.metrics = metrics
        look = await look_at(fake)
    assert look.load == Load()
    assert look.facts.tokens is None
    assert look.facts.engine == "vllm"


@pytest.mark.parametrize(
    ("names", "used"),
    [({"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc"}, 0.5), ({"vllm:kv_cache_usage_perc": None}, None)],
)
async def test_a_renamed_metric_is_read_and_a_dropped_one_is_unknown(names: dict[str, str | None], used: float) -> None:
    async with FakeNode() as fake:
        fake.kv_usage = 0.5
        fake.metric_names = names
        assert (await look_at(fake)).load.used == used


async def test_the_nodes_own_key_is_sent() -> None:
    async with FakeNode(requires_key="secret") as fake:
        look = await look_at(fake, key="secret")
        assert list(look.facts.models) == ["tiny"]
        with pytest.raises(ProbeFailed) as failure:
            await look_at(fake, key="wrong")
    assert failure.value.status == 401
    assert "wrong" not in str(failure.value)
    assert "/v1/models" in str(failure.value)


async def test_nobody_listening_is_told_from_slow() -> None:
    async with FakeNode() as fake:
        pass
    with pytest.raises(ProbeFailed) as failure:
        await look_at(fake)
    assert refused(failure.value)
    assert failure.value.status is None
    async with FakeNode() as fake:
        fake.frozen = True
        began = monotonic()
        with pytest.raises(ProbeFailed) as failure:
            await look_at(fake, timeout_s=0.2)
        assert 0.15 < monotonic() - began < 0.6
        fake.frozen = False
    assert not refused(failure.value)


@pytest.mark.parametrize(("engine", "health"), [("vllm", 503), ("vllm", 500), ("llamacpp", 503)])
async def test_an_engine_that_says_it_is_not_well_is_not_well(engine: str, health: int) -> None:
    async with FakeNode(dialect=engine) as fake:
        fake.health = health
        with pytest.raises(ProbeFailed) as failure:
            await look_at(fake)
    assert failure.value.status == health


async def test_an_unanswered_sign_leaves_the_engine_unsure() -> None:
    """A vLLM whose list of models is anonymous and whose metrics are slow this once is not `openai` for ever."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        if b"/v1/models" in head:
            writer.write(raw(b'{"object":"list","data":[{"id":"m","owned_by":"us"}]}'))
        await reader.read()

    async with raw_server(answer) as url:
        it = Spec(name="n", url=url, pools=BOTH)
        async with probing([it], timeout_s=0.2) as probe:
            look = await probe.look(it)
    assert (look.facts.engine, look.sure) == ("openai", False)


def raw(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\x01\x02\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
        raw(b"<html>welcome</html>"),
        raw(b'"models"'),
        raw(b"[]"),
        raw(b'{"data": 3}'),
        raw(b'{"data": {"id": "m"}}'),
        raw(b"[" * 100_000),
        raw(b'{"data": "\xff"}'),
        raw(b"x" * (4 * 2**20 + 1)),
        raw(b"{}", b"503 Service Unavailable"),
        raw(b"{}", b"401 Unauthorized"),
    ],
)
async def test_whatever_comes_is_at_most_a_failed_look(answer: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(answer)
        await writer.drain()

    async with raw_server(say) as url:
        for engine in ("auto", *ENGINES):
            it = Spec(name="n", url=url, pools=BOTH, engine=engine)
            async with probing([it]) as probe:
                with pytest.raises(ProbeFailed) as failure:
                    await probe.look(it)
            assert not refused(failure.value)


async def test_a_server_without_a_list_of_models_is_alive() -> None:
    async with FakeNode(dialect="openai") as fake:
        look = await look_at(fake, url=f"{fake.url}/elsewhere/v1", models={"public": "own"}, engine="openai")
    assert look.facts.models == {}


async def test_a_trickle_is_cut_off() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"x")
            await asyncio.sleep(0.02)

    async with raw_server(trickle) as url:
        it = Spec(name="n", url=url, pools=BOTH)
        async with probing([it], timeout_s=0.3) as probe:
            began = monotonic()
            with pytest.raises(ProbeFailed):
                await probe.look(it)
            assert monotonic() - began < 0.8


def test_a_bare_refusal_is_recognised_anywhere_in_the_chain() -> None:
    inner = ConnectionRefusedError(111, "refused")
    group = ExceptionGroup("all attempts", [OSError("other"), inner])
    outer = ProbeFailed("x")
    outer.__cause__ = group
    assert refused(outer)
    loop = ProbeFailed("loop")
    loop.__context__ = outer
    group.__context__ = loop
    assert refused(loop)
    assert not refused(ProbeFailed("x"))
    assert not refused(TimeoutError())
