"""`spotlight launch` from the real command line through real SkyPilot: plan, train, lose machines, take down."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Any

import pytest
from box import Box
from laptop import Laptop

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.timeout(5400)]

SMALL = (
    "data.prompts_per_iteration=4",
    "data.group_size=8",
    "data.validation_size=8",
    "eval_every=1000",
    "checkpoint_every=20",
    "cluster.start_with=2",
    "cluster.respawn_s=1",
    "iterations=60",
)
RUN = "boxed"
GPUS = {"p5.4xlarge": 1, "g3.8xlarge": 2}
PLAN = ("launch", "--gpus", "H100:64", "--spot-ratio", "0.75", "--dry-run")


def test_a_plan_is_shown_and_nothing_created(laptop: Laptop) -> None:
    text = laptop.spotlight(*PLAN)
    laptop.phase("plan of 64 GPUs")
    assert "48 spot + 16 on-demand" in text
    plan = json.loads(laptop.spotlight(*PLAN, "--json"))
    laptop.phase("plan of 64 GPUs, --json")
    assert plan["gpus"] == {"spot": 48, "on_demand": 16}
    assert [(row["price_class"], row["nodes"], row["gpus_per_node"]) for row in plan["rows"]] == [
        ("on_demand", 2, 8),
        ("spot", 6, 8),
    ]
    assert plan["usd_per_h"] < plan["on_demand_usd_per_h"] == plan["ceiling_usd_per_h"]
    assert "EC2 spot price history" in plan["prices"]
    assert plan["rows"][1]["usd_per_h"] == pytest.approx(17.2 * 1.1)  # what EC2 says, not the catalog
    assert laptop.machines() == {}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--gpus", "B300:8"), 3),
        (("--gpus", "H100:8", "--infra", "gcp"), 4),
        (("--gpus", "H100:8", "--infra", "aws/us-east-1,aws/us-west-2"), 2),
        (("--gpus", "H100:8", "--store", "s3://no-such-bucket/x", "--yes"), 5),
        (("--gpus", "H100:8", "--name", "$(id)", "--yes"), 2),
        (("--gpus", "H100:8"), 2),  # nobody to ask
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_created(laptop: Laptop, arguments, code: int) -> None:
    laptop.refused("launch", "tiny", *arguments, code=code)
    assert laptop.machines() == {}


def test_the_doctor_finds_login_clock_and_bucket_well(laptop: Laptop) -> None:
    checks = json.loads(laptop.spotlight("doctor", "--cloud", "--gpus", "H100:8", "--json"))
    laptop.phase("doctor")
    found = {check["name"]: check for check in checks}
    for name in ("login aws", "clock aws", "bucket", "SkyPilot's port"):
        assert found[name]["verdict"] == "ok", found[name]
    limits = [check["found"] for name, check in found.items() if name.startswith("limit aws/us-east-1")]
    assert limits
    assert all(text.startswith("unknown: ") for text in limits)  # moto has no quotas of EC2


@pytest.mark.parametrize(
    ("refused", "said"),
    [("VcpuLimitExceeded", "error[quota]"), ("InsufficientInstanceCapacity", "error[capacity]")],
)
def test_a_cloud_that_says_no_in_every_zone_is_named_and_leaves_nothing(
    laptop: Laptop, box: Box, refused: str, said: str
) -> None:
    launch = ("launch", "tiny", "--gpus", "H100:1", "--infra", "aws/us-east-1", "--name", said[6:-1], "--yes")
    with box.refusing(dict.fromkeys(("us-east-1a", "us-east-1b"), refused)):
        told = laptop.refused(*launch, code=3)
    laptop.phase(f"launch refused: {refused}")
    assert said in told
    assert laptop.machines() == {}


@pytest.fixture(scope="module")
def lost(laptop: Laptop, box: Box) -> list[str]:
    """A run that was launched, has lost both spot machines, one of them without notice, and was taken down."""
    settings = [part for setting in SMALL for part in ("--set", setting)]
    launched = laptop.spotlight(
        "launch", "tiny", "--gpus", "H100:1,M60:4", "--spot-ratio", "0.8", "--infra", "aws/us-east-1",
        "--name", RUN, "--yes", "--json", *settings,
    )  # fmt: skip
    assert json.loads(launched)["run"] == RUN
    laptop.phase("on-demand part launched")
    try:
        live_through_losses(laptop, box)
    finally:  # whatever went wrong here is no other test's business
        told = laptop.spotlight("down", RUN)
        laptop.phase("down")
    assert told.endswith("none left\n")
    return ["s0", "s1"]


def live_through_losses(laptop: Laptop, box: Box) -> None:
    """From the first word of the run to its last, `status` telling the truth all the while."""

    def states() -> dict[str, str]:
        return {node["node"]: node["state"] for node in laptop.status(RUN)["nodes"]}

    laptop.wait("spot nodes ready", lambda: [states().get(n) for n in ("s0", "s1")] == ["ready"] * 2, RUN)
    machines = {node: instance for instance, node in laptop.machines("running").items()}
    box.interrupt(machines["s0"], notice_s=10.0)
    box.interrupt(machines["s1"])
    gone = ("lost", "joining", "back")
    laptop.wait("losses seen", lambda: states()["s0"] in gone and states()["s1"] in gone, RUN)
    laptop.wait("run finished", lambda: laptop.status(RUN)["state"] == "finished", RUN)


def test_a_run_survives_the_loss_of_its_spot_machines(laptop: Laptop, lost: list[str]) -> None:
    for node in lost:
        events = [e for e in laptop.events(RUN) if e["kind"] == "node" and e["node"] == node]
        states = [event["state"] for event in events]
        assert states[: states.index("lost") + 1] == ["joining", "ready", "lost"]
        assert "SpotInstanceTermination" in events[states.index("lost")]["why"]
    summary = json.loads((laptop.box.home / "spotlight/runs" / RUN / "summary.json").read_text())
    assert summary["preemptions"] == 2
    verdicts = json.loads(laptop.spotlight("verify", RUN, "--json"))
    assert [verdict for verdict in verdicts if not verdict["ok"]] == []


def heard(box: Box, kind: str) -> list[dict[str, Any]]:
    """What the run's scheduler heard of that kind, from the journal."""
    folder = box.home / "spotlight/runs" / RUN / "journal"
    journal = "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))
    events = [json.loads(line).get("event", {}) for line in journal.splitlines()]
    return [event for event in events if event.get("type") == kind]


@pytest.mark.usefixtures("lost")
def test_the_notice_comes_from_the_machines_own_metadata_service(box: Box) -> None:
    assert {(event["node"], event["source"]) for event in heard(box, "Notice")} == {("s0", "aws")}


def test_a_spot_machine_has_an_explorer_on_each_of_its_gpus(box: Box, lost: list[str]) -> None:
    joined = {event["worker"] for event in heard(box, "Join")}
    assert {f"{node}/{gpu}" for node in lost for gpu in range(2)} <= joined


@pytest.mark.usefixtures("lost")
def test_nothing_is_left_of_a_run_that_was_taken_down(laptop: Laptop, box: Box) -> None:
    assert laptop.machines() == {}
    laptop.wait("no trace left", lambda: not box.leftovers())


@pytest.mark.usefixtures("lost")
def test_node_hours_are_ec2s_own(laptop: Laptop) -> None:
    """Machine by machine, within a second: from EC2's launch time to the state change that it records."""
    report = json.loads(laptop.spotlight("cost-report", RUN, "--by", "node", "--json"))
    print(laptop.spotlight("cost-report", RUN, "--by", "node"))
    ours = {line["name"]: line["gpu_hours"] * 3600 for line in report["lines"]}
    launches: Counter[str] = Counter()
    for life in laptop.lives(RUN):
        # The on-demand machines are one cluster and carry one name; their lines are od0, od1, ...
        nth, on_demand = launches[life.node], life.node == "od0"
        launches[life.node] += 1
        name = f"od{nth}" if on_demand else life.node + (f"#{nth}" if nth else "")
        ours_s = ours.pop(name) / GPUS[life.kind]
        ec2_s = max(life.ended_s - life.began_s, 60.0)  # a minute is billed at least
        print(f"{name:6} {life.instance} {life.why:34} EC2 {ec2_s:8.1f} s   report {ours_s:8.1f} s")
        assert ours_s == pytest.approx(ec2_s, abs=1.0)
    assert ours == {}
    assert launches.keys() == {"od0", "s0", "s1"}
    assert launches["od0"] == 1
    assert not [note for note in report["notes"] if "end" in note]


@pytest.mark.parametrize("stage", ["asked-for", "being-set-up"])
def test_ctrl_c_during_a_launch_leaves_no_machine(laptop: Laptop, box: Box, stage: str) -> None:
    # Whoever started us may have had Ctrl-C ignored, and that is inherited.
    launch = ["spotlight", "launch", "tiny", "--gpus", "H100:1", "--name", stage, "--yes"]
    process = box.spawn(stage, ["env", "--default-signal=INT", *launch])
    laptop.wait(f"machine {stage}", laptop.machines if stage == "asked-for" else box.homes)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == 130
    assert laptop.machines() == {}
    laptop.phase("interrupted launch tidied up")
    laptop.wait("nothing under way any more", lambda: not laptop.launches() and not box.leftovers())
    assert laptop.machines() == {}
