"""What each command prints and calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotlight import config
from spotlight.names import run_dir
from spotlight.observe import progress
from spotlight_cli.train import default_name


def test_train_passes_its_flags_on(run: Any, api: Any) -> None:
    result = run(
        "train", "tiny", "--set", "train.lr=1e-4", "--spot", "0", "--name", "first", "--preempt", "none",
        "--seed", "7", "--iterations", "2", "--resume", "-q",
    )  # fmt: skip
    assert result.code == 0, result.err
    call = api.calls[0]
    resolved = call.pop("config")
    assert call == {"name": "first", "base_name": "tiny", "spot": 0, "preempt": "none", "resume": True}
    assert (resolved.seed, resolved.iterations, resolved.train.lr) == (7, 2, 1e-4)


def test_a_flag_wins_over_set(run: Any, api: Any) -> None:
    assert run("train", "--set", "seed=1", "--seed", "2", "-q").code == 0
    assert api.calls[0]["config"].seed == 2


def test_train_tells_the_run_in_plain_lines_and_prints_the_summary(run: Any) -> None:
    result = run("train", "--iterations", "3")
    assert result.code == 0
    for said in (
        "run tiny started (tiny, flow_grpo, 3 iterations)",
        "node spot-0 lost: killed without notice",
        "node spot-0 is back",
        "iteration 2: reward 0.7, loss 0.01, roll-out 21.4 images/s, drafts 32",
        "held-out score 0.83, exact 30 %",
        "warning: prompt [bold] [31m<script>alert(1)</script> was empty",
    ):
        assert said in result.err, said
    assert "\x1b" not in result.err + result.out
    assert result.out.splitlines() == [
        "  held-out score           0.59 → 0.83  (+0.24)",
        "  iterations               3 in 12 s",
        "  drafts during training   90 of 96",
        "  spot nodes idle          6 % of the training time (busy 94 %)",
        "  preemptions survived     1",
        "  samples moved / lost     3 / 0",
        "  the same hours on H100s  $0.0312 (estimate, $0.0897 on demand only)",
    ]
    assert "next:" not in result.err


def test_train_quiet_leaves_stderr_empty(run: Any) -> None:
    assert run("train", "--quiet").err == ""


def test_train_json_is_one_document_and_nothing_else(run: Any, api: Any) -> None:
    result = run("train", "--json")
    assert result.document == {**api.SUMMARY, "run": "tiny"}
    assert result.err == ""


def test_a_run_name_that_exists_is_refused_unless_resumed(run: Any) -> None:
    assert run("train", "-q", "--name", "a").code == 0
    again = run("train", "-q", "--name", "a")
    assert (again.code, again.out) == (2, "")
    assert "--resume" in again.err
    assert run("train", "-q", "--resume", "--name", "a").code == 0


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("tiny", "tiny"), ("qwen-image-geneval-1280", "qwen-image-genev"), ("a/My Recipe_2.yaml", "my-recipe-2"),
     ("9lives.yaml", "run-9lives"), ("héé.yaml", "h"), ("---.yaml", "run")],
)  # fmt: skip
def test_default_names_are_run_names(recipe: str, name: str) -> None:
    from spotlight.names import run_name

    assert default_name(recipe) == name
    assert run_name(name) == name


def test_sample_writes_a_picture(run: Any, tmp_path: Path) -> None:
    run("train", "-q")
    target = tmp_path / "a.png"
    assert run("sample", "tiny", "482", "--out", str(target), "--seed", "9").out == f"{target}\n"
    assert target.read_bytes().startswith(b"\x89PNG")
    assert run("sample", "tiny", "482", "-o", str(target), "--json").document["prompt"] == "482"


def test_export_passes_its_flags_on_and_prints_where_it_is(run: Any, api: Any, tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = run(
        "export", "tiny", "-o", str(target), "--merged", "--live", "--checkpoint", "7", "--push", "me/mine"
    )  # fmt: skip
    assert result.code == 0, result.err
    asked = {"run": "tiny", "out": target, "merged": True, "live": True, "checkpoint": 7, "push": "me/mine"}
    assert api.calls == [asked]
    assert result.out.splitlines() == [str(target / "transformer"), "https://hub.example/me/mine"]
    api.calls.clear()
    assert run("export", "tiny", "--json").document["pushed_to"] is None
    default = {"merged": False, "live": False, "checkpoint": None, "push": None}
    assert api.calls == [{"run": "tiny", "out": Path("tiny-export"), **default}]


def test_status_is_the_same_as_table_and_as_json(run: Any) -> None:
    run("train", "-q", "--iterations", "30")
    table, document = run("status").out, run("status", "tiny", "--json").document
    assert (document["run"], document["state"], document["preemptions"]) == ("tiny", "finished", 1)
    assert "tiny: finished, 3/30 iterations" in table
    assert "0.59 → 0.83" in table
    node = next(node for node in document["nodes"] if node["node"] == "spot-0")
    assert (node["state"], node["price_class"]) == ("ended", "spot")
    assert any(line.split()[:4] == ["spot-0", "explorer", "spot", "ended"] for line in table.splitlines())
    assert all(age >= 0 for key, age in document.items() if key.endswith("age_s") and age is not None)


def test_status_json_has_every_age(run: Any) -> None:
    run("train", "-q")
    document = run("status", "--json").document
    for fact in ("score", "numbers", "checkpoint", "started", "seen"):
        assert isinstance(document[f"{fact}_age_s"], float), fact


def test_logs_print_the_last_lines_or_all(run: Any) -> None:
    run("train", "-q")
    every = run("logs", "tiny").out.splitlines()
    assert "run tiny started" in every[0]
    assert "run finished" in every[-1]
    assert run("logs", "tiny", "-n", "2").out.splitlines() == every[-2:]


def test_logs_json_is_one_object_a_line(run: Any) -> None:
    run("train", "-q")
    events = [json.loads(line) for line in run("logs", "tiny", "--json").out.splitlines()]
    assert events == list(progress.events(run_dir("tiny")))


def test_logs_follow_ends_with_the_run(run: Any) -> None:
    run("train", "-q")
    assert run("logs", "tiny", "-f").code == 0


def test_logs_follow_tells_what_comes_later(run: Any, api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_dir("tiny")
    log = progress.ProgressLog(folder)
    log({"kind": "run_started", "run": "tiny", "iterations": 1})
    later = [{"kind": "warning", "text": "later"}, {"kind": "run_finished", "summary": {}}]
    monkeypatch.setattr("spotlight_cli.runs.time.sleep", lambda seconds: log(later.pop(0)))
    said = run("logs", "tiny", "-f").out.splitlines()
    assert [line.split("  ")[1].split(":")[0] for line in said] == [
        "run tiny started (1 iterations)",
        "warning",
        "run finished",
    ]


def test_status_watch_ends_with_the_run(run: Any) -> None:
    run("train", "-q")
    assert run("status", "--watch").out.count("held-out score  ") == 1


def test_report_writes_a_page(run: Any, tmp_path: Path) -> None:
    run("train", "-q")
    page = Path(run("report", "tiny").out.strip())
    assert page.name == "report.html"
    assert page.read_text().startswith("<!doctype html>")
    elsewhere = run("report", "tiny", "--out", str(tmp_path / "no" / "such" / "r.html"))
    assert (elsewhere.code, elsewhere.out) == (2, "")


def test_verify_prints_verdicts_and_fails_with_the_offenders(run: Any, api: Any) -> None:
    assert [row["ok"] for row in run("verify", "tiny", "--json").document] == [True, True]
    assert api.calls[-1] == {"verify": "tiny", "replay": False}
    assert "INV-2 one commit" in run("verify", "tiny", "--replay").out
    api.verdicts.append(api.Verdict("INV-3 fenced", False, problems=("it1/row2/s3 committed under token 4",)))
    broken = run("verify", "tiny")
    assert (broken.code, broken.out) == (6, "")
    assert "INV-3 fenced: it1/row2/s3 committed under token 4" in broken.err


def test_config_show_can_be_loaded_again(run: Any, tmp_path: Path) -> None:
    shown = run("config", "show", "tiny", "--set", "iterations=3").out
    (tmp_path / "copy.yaml").write_text(shown)
    assert config.load(str(tmp_path / "copy.yaml")) == config.load("tiny", ["iterations=3"])
    as_json = run("config", "show", "--json").document
    assert as_json == yaml.safe_load(run("config", "show").out)


def test_config_schema_knows_every_key(run: Any) -> None:
    schema = run("config", "schema").document
    assert "iterations" in schema["properties"]
    assert schema["additionalProperties"] is False


def test_recipes_lists_what_is_shipped(run: Any) -> None:
    assert [row["name"] for row in run("recipes", "--json").document] == config.recipes()
    assert run("recipes").out.splitlines()[0].split()[0] == "NAME"


def test_doctor_names_each_finding(run: Any) -> None:
    result = run("doctor", "--json")
    findings = {check["name"]: check["verdict"] for check in result.document}
    assert {"python", "ray", "skypilot", "runs folder", "disk"} <= set(findings)
    assert findings["skypilot"] == "ok"


def test_doctor_fails_when_runs_cannot_be_written(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPOTLIGHT_HOME", str(tmp_path / "file"))
    result = run("doctor")
    assert result.code == 3
    assert "runs folder" in result.err
    assert "SPOTLIGHT_HOME" in result.err


def test_a_canary_secret_reaches_no_output(
    run: Any, api: Any, spotlight_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "canary-8f2b1c77d0e94a55"
    monkeypatch.setenv("HF_TOKEN", canary)
    api_story = api.story

    def leaky(*arguments: Any) -> list[dict[str, Any]]:
        return [
            *api_story(*arguments),
            {"kind": "warning", "text": f"401 for token {canary}", "api_key": canary},
        ]

    monkeypatch.setattr(api, "story", leaky)
    told = [
        run("train"), run("status"), run("status", "--json"),
        run("logs", "tiny"), run("logs", "tiny", "--json"),
        run("report", "tiny"), run("config", "show", "--set", f"model.path={canary}"),
        run("config", "show", "--json", "--set", f"model.path={canary}"),
    ]  # fmt: skip
    assert all(result.code == 0 for result in told)
    assert not any(canary in result.out + result.err for result in told)
    files = [path for path in spotlight_home.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"progress.jsonl", "report.html"}
    assert not any(canary.encode() in path.read_bytes() for path in files)
