"""Metrics: what is counted, what a scrape looks like, and that no stranger can grow it."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from router.core.account import MOST_KINDS, Account
from router.core.call import ENDPOINTS, Call, Endpoint, Outcome, Reason, Usage, Workload
from router.core.node import State
from router.metrics import MOST_SERIES, Metrics

ROOT = Path(__file__).resolve().parent.parent


def call(**changed):
    whole = {
        "id": "req_1",
        "endpoint": ENDPOINTS["chat/completions"],
        "model": "llama",
        "body": b"{}",
        "prompt_tokens": 10,
        "output_tokens": 20,
        "workload": Workload.INTERACTIVE,
        "reason": Reason.STREAM,
        "stream": True,
    }
    return Call(**{**whole, **changed})


def samples(metrics):
    """Every sample of a scrape, by name and sorted labels."""
    text = metrics.render()[0].decode()
    return {(s.name, *sorted(s.labels.items())): s.value for family in parse_text(text) for s in family.samples}


def test_a_finished_call_is_counted_once_everywhere():
    metrics = Metrics(["a"])
    one = call()
    metrics.classified(one)
    metrics.leg("a", Outcome.COMPLETED)
    ended = {"place": "a", "queued_s": 0.02, "first_token_s": 0.3, "duration_s": 1.5, "usage": Usage(7, 9)}
    metrics.finished(Account(one, Outcome.COMPLETED, **ended))
    found = samples(metrics)
    chat, endpoint = ("workload", "interactive"), ("endpoint", "chat/completions")
    assert found["ebbtide_calls_total", endpoint, ("outcome", "completed"), chat] == 1
    assert found["ebbtide_classified_total", ("reason", "stream"), chat] == 1
    assert found["ebbtide_legs_total", ("node", "a"), ("outcome", "completed")] == 1
    assert found["ebbtide_prompt_tokens_total", chat] == 7
    assert found["ebbtide_output_tokens_total", chat] == 9
    assert found["ebbtide_queue_seconds_sum", chat] == 0.02
    assert found["ebbtide_call_duration_seconds_count", endpoint, chat] == 1
    assert found["ebbtide_time_to_first_token_seconds_bucket", ("le", "0.2"), ("node", "a"), chat] == 0
    assert found["ebbtide_time_to_first_token_seconds_bucket", ("le", "0.35"), ("node", "a"), chat] == 1
    assert found["ebbtide_time_to_first_token_seconds_bucket", ("le", "+Inf"), ("node", "a"), chat] == 1


def test_what_never_came_is_not_observed():
    metrics = Metrics(["a"])
    metrics.finished(Account(call(), Outcome.REFUSED, queued_s=2.0, duration_s=2.0))
    names = {name for name, *_ in samples(metrics)}
    assert "ebbtide_call_duration_seconds_sum" in names
    assert not {"ebbtide_time_to_first_token_seconds_sum", "ebbtide_prompt_tokens_total"} & names


def test_a_value_on_a_bound_is_within_it():
    metrics = Metrics()
    metrics.loop_lag(0.01)
    assert samples(metrics)["ebbtide_event_loop_lag_seconds_bucket", ("le", "0.01")] == 1
    assert samples(metrics)["ebbtide_event_loop_lag_seconds_bucket", ("le", "0.005")] == 0


def test_levels_and_single_counters():
    metrics = Metrics()
    metrics.waiting(Workload.BATCH, 3, 4096)
    metrics.waiting(Workload.BATCH, 2, 100)
    metrics.relayed("no_room")
    metrics.truncated("relay")
    metrics.oversized_event()
    metrics.tokenizer(exact=True)
    with metrics.streams, metrics.streams:
        assert samples(metrics)["ebbtide_open_streams",] == 2
    found = samples(metrics)
    assert found["ebbtide_queue_calls", ("workload", "batch")] == 2
    assert found["ebbtide_queue_bytes", ("workload", "batch")] == 100
    assert found["ebbtide_relayed_total", ("cause", "no_room")] == 1
    assert found["ebbtide_truncated_total", ("node", "relay")] == 1
    assert found["ebbtide_oversized_events_total",] == 1
    assert found["ebbtide_tokenizer_exact",] == 1
    assert found["ebbtide_open_streams",] == 0
    assert found["process_resident_memory_bytes",] > 1e6
    assert [name for name, *_ in found if name == "ebbtide_build_info"]


def test_nodes_are_read_when_scraped():
    metrics = Metrics(["a", "b"])
    a = SimpleNamespace(
        name="a", up=True, state=State.READY, running={"batch": 2}, room={"capacity": 1000, "batch": 300}
    )
    b = SimpleNamespace(name="b", up=False, state=State.DOWN, running={}, room={})
    metrics.watch(lambda: [a, b])
    found = samples(metrics)
    assert (found["ebbtide_node_up", ("node", "a")], found["ebbtide_node_up", ("node", "b")]) == (1, 0)
    assert [found["ebbtide_node_state", ("node", "b"), ("state", state)] for state in State] == [
        state is State.DOWN for state in State
    ]
    assert found["ebbtide_node_running", ("node", "a"), ("workload", "batch")] == 2
    assert found["ebbtide_node_room_tokens", ("kind", "capacity"), ("node", "a")] == 1000
    assert ("ebbtide_node_room_tokens", ("kind", "capacity"), ("node", "b")) not in found, "unknown is not zero"
    a.up = False
    assert samples(metrics)["ebbtide_node_up", ("node", "a")] == 0


def test_strangers_add_one_series_at_most():
    metrics = Metrics(["a"])
    for index in range(1000):
        odd = call(id=str(index), model=f"m{index}" * 100, caller=f"c{index}", endpoint=Endpoint(path=f"x/{index}"))
        metrics.finished(
            Account(odd, Outcome.COMPLETED, place=f"n{index}", queued_s=0.0, first_token_s=0.1, duration_s=0.1)
        )
        metrics.leg(f"n{index}", Outcome.COMPLETED)
        metrics.truncated(f"n{index}")
    for family in metrics.families():
        assert len(family.values) <= 1
    assert "other" in metrics.render()[0].decode()


def test_even_mistakes_of_ours_are_bounded():
    metrics = Metrics()
    for index in range(MOST_SERIES + 500):
        metrics.relayed(f"cause {index}")
    assert len(samples(metrics)) < MOST_SERIES + 200
    assert samples(metrics)["ebbtide_relayed_total", ("cause", "other")] == 500


def test_new_settings_bring_new_names():
    metrics = Metrics(["a"])
    metrics.know(["b"])
    metrics.truncated("b")
    assert samples(metrics)["ebbtide_truncated_total", ("node", "b")] == 1


def test_calls_end_under_the_name_their_node_had_then():
    metrics = Metrics()
    metrics.finished(Account(call(), Outcome.COMPLETED, place="b", answered=True))
    metrics.know(["b"])
    metrics.finished(Account(call(), Outcome.COMPLETED, place="b", answered=True))
    legs = {dict(labels)["node"]: value for (name, *labels), value in samples(metrics).items() if "_legs_" in name}
    assert legs == {"other": 1, "b": 1}
    metrics.finished(Account(call(), Outcome.COMPLETED, place="b", first_token_s=0.1, answered=True))
    metrics.forget("b")
    assert not [name for name in samples(metrics) if ("node", "b") in name]


def test_kinds_of_calls_are_bounded_and_none_is_lost():
    metrics = Metrics(["a"])
    for index in range(3 * MOST_KINDS):
        metrics.finished(Account(call(endpoint=Endpoint(path=f"x/{index}")), Outcome.COMPLETED, place="a"))
    assert len(metrics._ended.take()) <= MOST_KINDS
    other = ("endpoint", "other"), ("outcome", "completed"), ("workload", "interactive")
    assert samples(metrics)["ebbtide_calls_total", *other] == 2 * MOST_KINDS


SECONDS = st.sampled_from([0.0, 0.01, 0.3, 4.0, 1e4])
ACCOUNTS = st.builds(
    lambda stream, path, workload, **rest: Account(
        call(stream=stream, workload=workload, endpoint=Endpoint(path=path)), **rest
    ),
    stream=st.booleans(),
    path=st.sampled_from(["chat/completions", "score", "strange"]),
    workload=st.sampled_from(Workload),
    outcome=st.sampled_from([Outcome.COMPLETED, Outcome.CUT]),
    place=st.sampled_from(["", "a", "b", "relay"]),
    answered=st.booleans(),
    queued_s=SECONDS,
    first_token_s=st.none() | SECONDS,
    duration_s=SECONDS,
    usage=st.none() | st.builds(Usage, st.integers(-1, 9), st.integers(-1, 9)),
)


@given(st.lists(ACCOUNTS | st.sampled_from(["know", "forget"]), max_size=12))
def test_it_does_not_matter_how_often_somebody_asks(what):
    seldom, often = Metrics(["a"]), Metrics(["a"])
    for one in what:
        for metrics in (seldom, often):
            metrics.finished(one) if isinstance(one, Account) else getattr(metrics, one)(*"b")
        often.families()
    told = [
        {(name, *labels): value for (name, *labels), value in samples(metrics).items() if "process" not in name}
        for metrics in (seldom, often)
    ]
    assert told[0] == pytest.approx(told[1])


def test_a_node_that_is_gone_takes_its_series_along():
    metrics = Metrics(["a", "b"])
    for node in "ab":
        metrics.leg(node, Outcome.COMPLETED)
        metrics.truncated(node)
        metrics.finished(Account(call(), Outcome.COMPLETED, place=node, first_token_s=0.1))
    metrics.forget("a")
    found = samples(metrics)
    assert not [name for name in found if ("node", "a") in name]
    assert found["ebbtide_legs_total", ("node", "b"), ("outcome", "completed")] == 1
    assert [name for name in found if name[0] == "ebbtide_time_to_first_token_seconds_bucket" and ("node", "b") in name]
    assert (
        found[
            "ebbtide_calls_total",
            ("endpoint", "chat/completions"),
            ("outcome", "completed"),
            ("workload", "interactive"),
        ]
        == 2
    )
    metrics.truncated("a")
    assert samples(metrics)["ebbtide_truncated_total", ("node", "other")] == 1


def test_how_the_last_reload_went():
    metrics = Metrics()
    metrics.reloaded(1000.0)
    metrics.reloaded(None)
    found = samples(metrics)
    assert found["ebbtide_config_last_reload_successful",] == 0
    assert found["ebbtide_config_last_reload_success_timestamp_seconds",] == 1000.0


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("text/plain", "text/plain"),
        ("application/openmetrics-text; version=1.0.0,text/plain;q=0.5", "application/openmetrics-text"),
        ("application/openmetrics-text; version=x", "text/plain"),
        (";;,=,\x00", "text/plain"),
    ],
)
def test_scrapes_are_what_the_scraper_asks_for(accept, kind):
    metrics = Metrics(["a"])
    metrics.finished(
        Account(call(), Outcome.COMPLETED, place="a", first_token_s=0.1, duration_s=0.1, usage=Usage(1, 1))
    )
    body, content_type = metrics.render(accept)
    assert content_type.startswith(kind)
    parse = parse_openmetrics if kind != "text/plain" else parse_text
    assert {family.name for family in parse(body.decode())} >= {"ebbtide_open_streams", "ebbtide_queue_seconds"}


def test_two_routers_in_one_process_count_apart():
    one, other = Metrics(["a"]), Metrics(["a"])
    one.truncated("a")
    assert ("ebbtide_truncated_total", ("node", "a")) not in samples(other)


def test_counting_a_call_is_cheap():
    metrics, one, usage = Metrics(["a"]), call(), Usage(7, 9)

    def took():
        began = time.process_time()
        for _ in range(1000):
            metrics.classified(one)
            metrics.leg("a", Outcome.COMPLETED)
            metrics.finished(
                Account(
                    one, Outcome.COMPLETED, place="a", queued_s=0.01, first_token_s=0.2, duration_s=1.0, usage=usage
                )
            )
        return time.process_time() - began

    # 8 us is the aim and 4 what it takes; the bound leaves room for a slow machine.
    assert min(took() for _ in range(10)) / 1000 < 30e-6


def test_every_metric_is_documented():
    page = (ROOT / "docs/metrics.md").read_text()
    for family in Metrics().families():
        assert f"| `{family.name}{'_total' if family.kind == 'counter' else ''}` | {family.kind} |" in page
