"""`spotlight cost-report` from run folders on disk to what is printed."""

from __future__ import annotations

import csv
import io
import json

import pytest

from spotlight.core import cost
from spotlight.errors import UserError
from spotlight.names import home
from spotlight.observe.journal import Journal
from spotlight_cli.cost import parse_since
from spotlight_cli.main import main

T0 = 1_772_000_000.0


def write_run(name, *, cloud="aws", zone="use2-az1", usd="15", hours=2.0, scores=(), more=()):
    """A run folder with a journal of one spot node, and metrics."""
    folder = home() / "runs" / name
    journal = Journal(folder / "journal")
    market = {
        "cloud": cloud,
        "region": "us-east-2",
        "zone": zone,
        "instance_type": "p5.48xlarge",
        "price_class": "spot",
    }
    records = [
        cost.NodeRequested(node="s0", at_s=T0, gpus=8, **market),
        cost.NodeUp(node="s0", at_s=T0),
        cost.NodeReady(node="s0", at_s=T0 + 360),
        cost.NodeEnded(
            node="s0", at_s=T0 + hours * 3600, reason="user", source="ec2:Client.UserInitiatedShutdown"
        ),
    ]
    if usd:
        records.append(
            cost.PricePoint(
                **market, usd_per_h=cost.amount(usd), source="EC2 spot price history", as_of="2026-02-25"
            )
        )
    for record in [*records, *more]:
        journal.append(cost.encode(record))
    journal.close()
    rows = [{"kind": "eval", "at_s": at_s, "score": score} for at_s, score in scores]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))  # no catalog but ours

    def run(*arguments):
        code = main(["cost-report", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_total_is_the_last_line_and_every_price_has_its_source(call):
    write_run("r1", scores=[(T0, 0.5), (T0 + 7200, 0.8)])
    code, out, err = call("r1", "--target", "0.7")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1].split() == ["total", "16.00", "30.00"]
    assert "EC2 spot price history, 2026-02-25" in out
    assert "estimated; 0 of 1 machines reconciled" in out
    assert "saved $80.08 (73%)" in out
    assert "$1.00 per +0.01, $30.00 to 0.7" in out
    assert "not included" in out


def test_json_is_one_document_whose_lines_add_up(call):
    write_run("r1")
    code, out, _ = call("r1", "--json", "--by", "phase")
    document = json.loads(out)
    assert code == 0
    assert document["total_usd"] == pytest.approx(sum(line["usd"] for line in document["lines"]))
    assert document["total_usd"] == 30.0
    assert document["prices"][0]["as_of"] == "2026-02-25"


def test_csv_ends_in_the_total(call):
    write_run("r1")
    code, out, _ = call("r1", "--csv", "--by", "node")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["name"] for row in rows] == ["s0", "total"]
    assert [row["usd"] for row in rows] == ["30.00", "30.00"]


def test_the_newest_run_is_the_default(call):
    write_run("r1")
    code, out, _ = call("--json")
    assert (code, json.loads(out)["runs"]) == (0, ["r1"])


def test_all_runs_by_run_and_a_broken_one_hides_none(call):
    write_run("r1")
    write_run("r2", hours=1.0)
    broken = write_run("r3")
    next((broken / "journal").glob("*.jsonl")).write_text('{"v":1,"type":"node","kind":"exploded"}\n')
    code, out, _ = call("--all", "--by", "run", "--json")
    document = json.loads(out)
    assert code == 0
    assert {line["name"]: line["usd"] for line in document["lines"]} == {"r1": 30.0, "r2": 15.0}
    assert any("r3: left out, not readable" in note for note in document["notes"])


def test_a_price_that_nobody_knows_is_shouted_not_zero(call):
    write_run("r1", cloud="moon", usd=None)
    code, out, _ = call("r1")
    assert code == 0
    assert "NO PRICE KNOWN" in out
    assert out.splitlines()[-1].split() == ["total", "16.00", "≥", "0.00"]


def test_a_local_run_says_what_it_would_have_cost(call):
    """2 h on 8 GPUs of a p5.48xlarge at the dearest spot zone of us-east-2: 2 x 17.2949 = 34.59."""
    write_run("r1", cloud="local", usd=None)
    code, out, _ = call("r1")
    assert code == 0
    assert "on rented H100s   $34.59" in out
    assert out.splitlines()[-1].split() == ["total", "16.00", "0.00"]


def test_since(call):
    write_run("r1")
    assert json.loads(call("r1", "--json", "--since", "2026-02-25T07:43:20+00:00")[1])["total_usd"] == 7.5


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("24h", 86400), ("7d", 604800), ("2w", 1209600)]
)
def test_since_as_an_age(text, seconds):
    assert parse_since(text, T0) == T0 - seconds


@pytest.mark.parametrize("text", ["", "yesterday", "-5h", "2026-03-02", "2026-03-02T10:00", "5y", "h"])
def test_a_since_that_is_no_time_is_a_user_error(text):
    with pytest.raises(UserError, match="--since"):
        parse_since(text, T0)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nobody",), 5),
        (("../../etc",), 2),
        (("r1", "--all"), 2),
        (("r1", "--csv", "--json"), 2),
        (("r1", "--by", "moon"), 2),
        (("r1", "--since", "soon"), 2),
    ],
)
def test_wrong_use_ends_with_its_code_and_an_empty_stdout(call, arguments, code):
    write_run("r1")
    got, out, err = call(*arguments)
    assert (got, out) == (code, "")
    assert err


def test_no_runs_at_all(call):
    assert call("--all")[0] == 5
    assert call()[0] == 5


def test_a_damaged_journal_names_the_record(call):
    folder = write_run("r1")
    next((folder / "journal").glob("*.jsonl")).write_text(
        '{"v":1,"type":"node","kind":"up","node":"s0","at_s":"x"}\n'
    )
    code, out, err = call("r1")
    assert (code, out) == (2, "")
    assert "node record 'up': at_s: Invalid isoformat string: 'x'" in err
