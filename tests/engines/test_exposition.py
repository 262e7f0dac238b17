from time import perf_counter

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.exposition import Sample, read_samples
from tests.engines.captures_of import text


def one(line: str, name: str = "m") -> list[Sample]:
    return read_samples(line, {name}).get(name, [])


def test_lines_as_the_format_allows_them() -> None:
    assert one("m 1") == [Sample({}, 1.0)]
    assert one("m{} 1.5e3 1395066363000\r") == [Sample({}, 1500.0)]
    assert one('m{a="1",b="x y",} -2\n') == [Sample({"a": "1", "b": "x y"}, -2.0)]
    assert one('m{ a = "1" , b="}{=,"}\t3') == [Sample({"a": "1", "b": "}{=,"}, 3.0)]
    assert one('m{a="back\\\\slash \\"quoted\\" line\\nfeed"} 1')[0].labels["a"] == 'back\\slash "quoted" line\nfeed'
    assert one('m{a="\u2028\x0b"} 1') == [Sample({"a": "\u2028\x0b"}, 1.0)]


def test_what_is_no_number_is_none() -> None:
    for value in ("NaN", "+Inf", "-Inf", "None", "1,5", "0x10"):
        assert one(f"m {value}") == [Sample({}, None)]


def test_other_lines_are_passed_over() -> None:
    for line in ("m", "m{", 'm{a="1"', "m_total 1", "mm 1", " m 1", "# TYPE m gauge", "M 1", "m 1 2 3", ""):
        assert one(line) == []
    assert read_samples("m 1\n", set()) == {}


@given(st.text())
def test_never_raises(junk: str) -> None:
    read_samples(junk, {"m"})
    read_samples(f'm{{{junk}}} {junk}\nm{{a="{junk}"}} 1', {"m"})


def test_quick_enough_for_the_event_loop() -> None:
    body = text("vllm/metrics.txt") * 4
    began = perf_counter()
    found = read_samples(body, {"vllm:num_requests_running", "vllm:cache_config_info"})
    assert perf_counter() - began < 0.05
    assert [len(samples) for samples in found.values()] == [4, 4]
