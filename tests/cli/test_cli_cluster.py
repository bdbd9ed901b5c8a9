"""`launch` and `down`: plan, question, refusal, and what is printed where."""

from __future__ import annotations

from typing import Any

import pytest

from spotlight.errors import CapacityError, CredentialError
from spotlight.names import run_dir


def test_a_dry_run_prints_the_plan_and_launches_nothing(run: Any, api: Any) -> None:
    result = run("launch", "tiny", "--gpus", "H100:64", "--spot-ratio", "0.75", "--dry-run")
    assert result.code == 0
    for text in (
        "48 spot + 16 on-demand",
        "$213.28, at most $440.32",
        "on-demand only  $440.32",
        "p5.48xlarge",
    ):
        assert text in result.out
    assert not [call for call in api.calls if "launch" in call]


def test_a_plan_is_one_document(run: Any) -> None:
    plan = run("launch", "--gpus", "H100:64", "--dry-run", "--json").document
    assert plan["gpus"] == {"spot": 48, "on_demand": 16}
    assert plan["usd_per_h"] == pytest.approx(213.28)
    assert {row["role"] for row in plan["rows"]} == {"trainer", "explorer"}


def test_a_launch_passes_on_what_was_said(run: Any, api: Any) -> None:
    result = run(
        "launch", "tiny", "--gpus", "H100:16", "--spot-ratio", "0.5", "--infra", "aws/us-east-1", "--name", "mine",
        "--store", "s3://b/runs", "--image", "ami-1", "--set", "seed=7", "--budget-usd", "100", "--max-hours", "2.5",
        "--yes",
    )  # fmt: skip
    assert result.code == 0
    assert result.out.splitlines()[-1] == "mine"
    assert "asking aws for od0" in result.err
    planned, launched = api.calls
    assert planned == {"plan": "H100:16", "spot_ratio": 0.5, "infra": "aws/us-east-1"}
    assert (launched["store"], launched["name"], launched["image"]) == ("s3://b/runs", "mine", "ami-1")
    config = launched["config"]
    assert (config.seed, config.budget.usd, config.budget.hours) == (7, 100, 2.5)


def test_under_json_stdout_is_one_document(run: Any) -> None:
    result = run("launch", "--gpus", "H100:16", "--store", "s3://b/runs", "--yes", "--json")
    assert result.document["run"] == "tiny"
    assert result.err == ""


def test_without_anybody_to_ask_nothing_is_rented(run: Any, api: Any) -> None:
    result = run("launch", "--gpus", "H100:16", "--store", "s3://b/runs")
    assert result.code == 2
    assert "--yes" in result.err
    assert not [call for call in api.calls if "launch" in call]


def test_no_is_the_default_answer(run: Any, api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text, default, err: default)
    assert run("launch", "--gpus", "H100:16", "--store", "s3://b/runs").code == 130
    assert not [call for call in api.calls if "launch" in call]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--gpus is missing"),
        (("--gpus", "H100"), "bad GPUs"),
        (("--gpus", "H100:8", "--spot-ratio", "1.5"), "bad spot ratio"),
        (("--gpus", "H100:8", "--yes"), "--store is missing"),
        (("--gpus", "H100:8", "--budget-usd", "-1"), "budget.usd"),
        (("--gpus", "H100:8", "--set", "sed=1"), "did you mean 'seed'"),
    ],
)
def test_wrong_usage_is_one_message(run: Any, arguments: tuple[str, ...], text: str) -> None:
    result = run("launch", "tiny", *arguments)
    assert result.code == 2
    assert text in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [(CredentialError("SkyPilot is not installed", hint="pip install"), 4), (CapacityError("no region"), 3)],
)
def test_a_missing_piece_is_one_message_and_its_exit_code(
    run: Any, api: Any, error: Exception, code: int
) -> None:
    api.before_plan.append(error)
    result = run("launch", "--gpus", "H100:64", "--dry-run")
    assert result.code == code
    assert str(error) in result.err
    assert result.out == ""


def test_down_says_how_many_there_were(run: Any) -> None:
    run_dir("mine").mkdir(parents=True)
    assert run("down", "mine").out == "mine: 2 machines ended, none left\n"
    assert run("down", "mine", "--json").document == {"run": "mine", "ended": 2, "left": 0}
    assert run("down", "nobody").code == 5


def test_doctor_looks_at_the_cloud_when_asked(run: Any, api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTLIGHT_STORE", "s3://mine/x")
    assert "s3://mine/x refuses" not in run("doctor").out
    result = run("doctor", "--cloud", "--gpus", "H100:64")
    assert api.calls == [{"check_cloud": "s3://mine/x", "gpus": "H100:64"}]
    assert result.code == 3
    assert "s3://mine/x refuses" in result.out
    assert "ask for access" in result.err
