"""`ebbtide diagnose`: a recorded series gives the verdicts a live router would have; bad input is told precisely."""

import json
from pathlib import Path

import pytest

from router.cli import main
from tests.fakes.days import DECAY, replace, samples, verdicts

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "config/examples/decay.csv"


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = main(["diagnose", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_example_is_a_leak_that_slows_the_node(capsys):
    status, out, err = run(capsys, EXAMPLE, "--limit", 64 * 2**30)
    assert (status, err) == (0, "")
    assert "memory_growth_with_drift since hour" in out
    assert "rss_bytes_slope" in out
    assert "memory reaches its limit in" in out


def test_in_json_every_number_is_there(capsys):
    status, out, _ = run(capsys, EXAMPLE, "--json")
    told = json.loads(out)
    assert status == 0
    assert told["last"]["verdict"] == told["verdicts"][-1]["verdict"] == "memory_growth_with_drift"
    assert told["last"]["projected_limit_s"] is None
    assert {"ttft_drift_ratio", "rss_bytes_slope", "relay_drift_ratio"} <= {
        one["name"] for one in told["last"]["evidence"]
    }
    first = next(one for one in told["verdicts"] if one["verdict"].startswith("memory"))
    assert 24 < (first["at"] - told["began"]) / 3600 < 31


def test_a_replay_tells_what_the_live_code_told(tmp_path, capsys):
    """The same minutes, once live and once from files."""
    day = replace(DECAY, seed=3, hours=38)
    node, relay = tmp_path / "node.csv", tmp_path / "relay.csv"
    with node.open("w") as ours, relay.open("w") as theirs:
        ours.write("at,ttft_s,gap_s,rss_bytes,running,waiting,restarts\n")
        theirs.write("at, ttft_s, gap_s\n")
        for one, other in samples(day):
            cells = (one.at, one.ttft_s, one.gap_s, one.rss_bytes, one.running, one.waiting, one.restarts)
            ours.write(",".join("" if cell is None else repr(cell) for cell in cells) + "\n")
            if other is not None:
                theirs.write(f"{other.at},{other.ttft_s},{other.gap_s}\n")
    told = json.loads(run(capsys, node, "--relay", relay, "--json")[1])
    live = [one.verdict for one in verdicts(day)]
    changes = [verdict for verdict, before in zip(live, [None, *live], strict=False) if verdict is not before]
    assert [one["verdict"] for one in told["verdicts"]] == [str(verdict) for verdict in changes]


def test_times_may_be_dates_and_columns_may_be_missing(tmp_path, capsys):
    file = tmp_path / "short.csv"
    file.write_text("rss_bytes,at\n1e9,2026-01-01T00:00:00Z\n,2026-01-01T00:01:00+00:00\n")
    status, out, _ = run(capsys, file)
    assert status == 0
    assert "unknown since" in out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "1: no column 'at'"),
        ("at\n", " no line after the header"),
        ("at,ttft\n", "1: column 2: unknown name 'ttft'; did you mean 'ttft_s'?"),
        ("at,wholly_other\n", "1: column 2: unknown name 'wholly_other'; known are at, ttft_s"),
        ("at,at\n", "1: column 2: 'at' is there twice"),
        ("at,gap_s\n1,2\n2,fast\n", "3: column gap_s: 'fast' is not a number, 0 or more"),
        ("at,gap_s\n1,-2\n", "2: column gap_s: '-2' is not a number, 0 or more"),
        ("at,gap_s\n1,nan\n", "2: column gap_s: 'nan' is not a number, 0 or more"),
        ("at,gap_s\nyesterday,2\n", "2: column at: 'yesterday' is not a number of seconds or an ISO 8601 time"),
        ("at,gap_s\n,2\n", "2: column at: empty"),
        ("at,gap_s\n1,2,3\n", "2: 3 cells for 2 columns"),
        ("at,gap_s\n2,2\n1,2\n", "3: column at: earlier than the line before"),
        ('at,gap_s\n1,"2\n', "2: not CSV: unexpected end of data"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, capsys, text, told):
    file = tmp_path / "bad.csv"
    file.write_text(text)
    status, out, err = run(capsys, file)
    assert (status, out) == (2, "")
    assert err.startswith(f"ebbtide: {file}:{told}")


def test_a_file_that_cannot_be_read(tmp_path, capsys):
    assert run(capsys, tmp_path / "none.csv") == (
        2,
        "",
        f"ebbtide: {tmp_path}/none.csv: cannot be read: no such file or directory\n",
    )
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"at\n\xff\xfe\n")
    assert run(capsys, binary)[2] == f"ebbtide: {binary}: not UTF-8 text\n"
