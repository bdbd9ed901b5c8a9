"""`spotlight launch` from the real command line through real SkyPilot: plan, train, lose a machine, take down."""

from __future__ import annotations

import json
import signal
import time

import pytest
from box import Box
from laptop import Laptop

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.timeout(1500)]

SMALL = (
    "data.prompts_per_iteration=4",
    "data.group_size=8",
    "data.validation_size=8",
    "eval_every=1000",
    "checkpoint_every=20",
    "cluster.start_with=1",
    "cluster.respawn_s=1",
)
RUN = "boxed"


@pytest.fixture(scope="module")
def laptop(box: Box) -> Laptop:
    found = Laptop(box)
    found.phase("box started")
    return found


def test_a_plan_is_shown_and_nothing_created(laptop: Laptop) -> None:
    plan = json.loads(
        laptop.spotlight("launch", "--gpus", "H100:64", "--spot-ratio", "0.75", "--dry-run", "--json")
    )
    laptop.phase("plan")
    assert plan["gpus"] == {"spot": 48, "on_demand": 16}
    assert [(row["price_class"], row["nodes"], row["gpus_per_node"]) for row in plan["rows"]] == [
        ("on_demand", 2, 8),
        ("spot", 6, 8),
    ]
    assert plan["usd_per_h"] < plan["on_demand_usd_per_h"] == plan["ceiling_usd_per_h"]
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
    laptop.spotlight("launch", "tiny", *arguments, code=code)
    assert laptop.machines() == {}


def test_a_run_survives_the_loss_of_a_spot_machine_and_ends_without_a_trace(laptop: Laptop, box: Box) -> None:
    settings = [part for setting in (*SMALL, "iterations=60") for part in ("--set", setting)]
    launched = laptop.spotlight(
        "launch", "tiny", "--gpus", "H100:3", "--spot-ratio", "0.67", "--infra", "aws/us-east-1",
        "--name", RUN, "--yes", "--json", *settings,
    )  # fmt: skip
    laptop.phase("on-demand part launched")
    assert json.loads(launched)["run"] == RUN

    def node_states() -> dict[str, str]:
        return {node["node"]: node["state"] for node in laptop.status(RUN)["nodes"]}

    laptop.wait("first spot node ready", lambda: "ready" in [node_states().get(n) for n in ("s0", "s1")], 400)
    victim = next(name for name, state in node_states().items() if name.startswith("s") and state == "ready")
    instance = next(instance for instance, node in laptop.machines("running").items() if node == victim)
    box.interrupt(instance, notice_s=10.0)
    laptop.wait(f"loss of {victim} seen", lambda: node_states()[victim] in ("lost", "joining", "back"), 120)
    laptop.wait("run finished", lambda: laptop.status(RUN)["state"] in ("finished", "failed"), 600)

    assert laptop.status(RUN)["state"] == "finished"
    told = [
        (e["state"], e.get("why", ""))
        for e in laptop.events(RUN)
        if e["kind"] == "node" and e["node"] == victim
    ]
    states = [state for state, _ in told]
    assert states[: states.index("lost") + 1] == ["joining", "ready", "lost"]
    assert "SpotInstanceTermination" in dict(told)["lost"]

    assert laptop.spotlight("down", RUN).endswith("none left\n")
    laptop.phase("down")
    assert laptop.machines() == {}
    laptop.wait("no trace left", lambda: not box.leftovers(), 60)
    journal = "".join(
        path.read_text() for path in (box.home / "spotlight/runs" / RUN / "journal").glob("*.jsonl")
    )
    events = [json.loads(line).get("event", {}) for line in journal.splitlines()]
    (notice,) = (event for event in events if event.get("type") == "Notice")
    assert (notice["node"], notice["source"]) == (victim, "aws")  # from the machine's own metadata service
    verdicts = json.loads(laptop.spotlight("verify", RUN, "--json"))
    assert all(verdict["ok"] for verdict in verdicts)
    laptop.spotlight("cost-report", RUN)


def test_ctrl_c_during_a_launch_leaves_no_machine(laptop: Laptop, box: Box) -> None:
    # Whoever started us may have had Ctrl-C ignored, and that is inherited.
    launch = ["spotlight", "launch", "tiny", "--gpus", "H100:1", "--name", "broken", "--yes"]
    process = box.spawn("interrupted", ["env", "--default-signal=INT", *launch])
    laptop.wait("machine asked for", laptop.machines, 120)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert laptop.machines() == {}
    laptop.phase("interrupted launch tidied up")
    time.sleep(5.0)  # an order that was still under way would have come by now
    assert laptop.machines() == {}
