"""Which sign tells a call's workload."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.body import Body, read_body
from router.core.call import ENDPOINTS, Reason, Workload
from router.core.classify import classify, told
from router.errors import BadRequest

INTERACTIVE, BATCH = Workload.INTERACTIVE, Workload.BATCH


def body(**fields) -> Body:
    return read_body(ENDPOINTS["responses"], json.dumps({"model": "m", "input": "hi", **fields}).encode())


def told_of(body, *, header=None, key_class=None, job=False, tokens=10, long=100, context=None):
    return classify(
        header=header,
        key_class=key_class,
        job=job,
        body=body,
        prompt_tokens=tokens,
        long_prompt_tokens=long,
        interactive_context=context,
    )


@pytest.mark.parametrize(
    ("fields", "signs", "expected"),
    [
        ({}, {}, (INTERACTIVE, Reason.DEFAULT)),
        ({"stream": True}, {}, (INTERACTIVE, Reason.STREAM)),
        ({"stream": True}, {"tokens": 100}, (INTERACTIVE, Reason.STREAM)),
        ({"stream": True}, {"tokens": 101}, (BATCH, Reason.SIZE)),
        ({}, {"tokens": 50, "context": 50}, (BATCH, Reason.CONTEXT)),
        ({}, {"tokens": 49, "context": 50}, (INTERACTIVE, Reason.DEFAULT)),
        ({}, {"tokens": 101, "context": 50}, (BATCH, Reason.SIZE)),
        ({"service_tier": "flex", "stream": True}, {}, (BATCH, Reason.TIER)),
        ({"service_tier": "priority"}, {"tokens": 10**6}, (INTERACTIVE, Reason.TIER)),
        ({"service_tier": "fast"}, {"tokens": 10**6}, (INTERACTIVE, Reason.TIER)),
        ({"service_tier": "ultrafast"}, {"tokens": 10**6}, (INTERACTIVE, Reason.TIER)),
        ({"service_tier": "auto"}, {"tokens": 10**6}, (BATCH, Reason.SIZE)),
        ({"service_tier": "scale"}, {}, (INTERACTIVE, Reason.DEFAULT)),
        ({"service_tier": ["flex"]}, {}, (INTERACTIVE, Reason.DEFAULT)),
        ({"background": True, "service_tier": "priority"}, {}, (BATCH, Reason.BACKGROUND)),
        ({"background": False}, {}, (INTERACTIVE, Reason.DEFAULT)),
        ({"background": "true"}, {}, (INTERACTIVE, Reason.DEFAULT)),
        ({"background_options": {"completion_window": "2h"}}, {}, (BATCH, Reason.BACKGROUND)),
        ({"background_options": {"completion_window": "8h"}}, {}, (BATCH, Reason.BACKGROUND)),
        ({"background_options": {"completion_window": "soonest"}}, {}, (INTERACTIVE, Reason.DEFAULT)),
        ({"background_options": {"completion_window": {}}}, {}, (INTERACTIVE, Reason.DEFAULT)),
        ({"service_tier": "priority"}, {"job": True}, (BATCH, Reason.JOB)),
        ({"service_tier": "flex"}, {"key_class": INTERACTIVE}, (INTERACTIVE, Reason.KEY)),
        ({}, {"key_class": INTERACTIVE, "tokens": 10**6}, (INTERACTIVE, Reason.KEY)),
        ({}, {"key_class": BATCH, "header": "interactive", "tokens": 10**6}, (INTERACTIVE, Reason.HEADER)),
        ({}, {"header": " Batch "}, (BATCH, Reason.HEADER)),
        ({}, {"header": "batch", "key_class": INTERACTIVE, "job": True}, (BATCH, Reason.HEADER)),
    ],
)
def test_the_strongest_sign_wins(fields, signs, expected):
    assert told_of(body(**fields), **signs) == expected


@pytest.mark.parametrize("header", ["", "urgent", "interactive,batch", "Ünïcode"])
def test_an_unknown_header_is_refused_by_name(header):
    with pytest.raises(BadRequest) as refused:
        told_of(body(), header=header)
    assert "'interactive' or 'batch'" in refused.value.message
    assert refused.value.param == "X-Ebbtide-Workload"
    assert refused.value.code == "invalid_value"


def test_what_nobody_stated_is_not_told():
    assert told(header=None, key_class=None, job=False, body=body(stream=True)) is None


@given(
    header=st.none() | st.sampled_from(["interactive", "batch", "BATCH"]),
    key_class=st.none() | st.sampled_from(Workload),
    job=st.booleans(),
    tier=st.none() | st.text() | st.sampled_from(["flex", "fast"]),
    background=st.none() | st.booleans(),
    tokens=st.integers(min_value=0),
    long=st.integers(min_value=0),
    context=st.none() | st.integers(min_value=0),
)
def test_every_call_has_a_workload_and_a_reason(header, key_class, job, tier, background, tokens, long, context):
    workload, reason = told_of(
        body(service_tier=tier, background=background),
        header=header,
        key_class=key_class,
        job=job,
        tokens=tokens,
        long=long,
        context=context,
    )
    assert isinstance(workload, Workload)
    assert isinstance(reason, Reason)
    if reason in (Reason.SIZE, Reason.CONTEXT, Reason.JOB, Reason.BACKGROUND):
        assert workload is BATCH
    if reason in (Reason.STREAM, Reason.DEFAULT):
        assert workload is INTERACTIVE
