"""A stand-in for `spotlight.api`: tells the story of a small run without doing any of it.

What is real: the run folder's progress file, status, report, errors. What is faked: every number and picture.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import spotlight
from spotlight.config import RunConfig
from spotlight.core.capacity import Plan
from spotlight.errors import NotFoundError, UserError
from spotlight.names import home, run_dir
from spotlight.observe import grids, progress
from spotlight.observe import status as status_model
from spotlight.observe.doctor import Check

SUMMARY = {
    "score_base": 0.59,
    "score_final": 0.83,
    "iterations": 3,
    "drafts": 96,
    "drafts_in_training": 90,
    "spot_busy_share": 0.94,
    "preemptions": 1,
    "samples_moved": 3,
    "samples_lost": 0,
    "usd_estimate": 0.0312,
    "usd_on_demand": 0.0897,
    "wall_s": 12.5,
}


@dataclass(frozen=True)
class Verdict:
    """One check over a journal."""

    name: str
    ok: bool
    checked: str = "12 requests"
    problems: tuple[str, ...] = ()


calls: list[dict[str, Any]] = []
verdicts: list[Verdict] = [Verdict("INV-1 one fate", True), Verdict("INV-2 one commit", True)]
before_plan: list[Exception] = []
before_end: list[Callable[[], None]] = []
pause_s = 0.0


def reset() -> None:
    """Forget what other tests did."""
    calls.clear()
    before_end.clear()
    before_plan.clear()
    verdicts[:] = [Verdict("INV-1 one fate", True), Verdict("INV-2 one commit", True)]


def train(
    config: RunConfig,
    *,
    name: str | None = None,
    base_name: str = "run",
    spot: int | None = None,
    preempt: str | None = None,
    resume: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Tell a run of three iterations in which one spot node dies and comes back."""
    flags = {"name": name, "base_name": base_name, "spot": spot, "preempt": preempt, "resume": resume}
    calls.append({"config": config, **flags})
    name = name or base_name
    folder = run_dir(name)
    if folder.exists() and not resume:
        raise UserError(f"run {name!r} exists", hint="take another --name, or --resume")
    log = progress.ProgressLog(folder, on_event)
    for event in story(name, config.iterations, folder):
        log(event)
        time.sleep(pause_s)
    for action in before_end:
        action()
    summary = {**SUMMARY, "run": name}
    log({"kind": "run_finished", "summary": summary})
    log.close()
    return summary


def story(name: str, iterations: int, folder: Path) -> list[dict[str, Any]]:
    """The events of a run, with a warning that tries to inject markup and escape sequences."""
    import numpy as np

    events: list[dict[str, Any]] = [
        {
            "kind": "run_started",
            "run": name,
            "recipe": "tiny",
            "algorithm": "flow_grpo",
            "iterations": iterations,
        },
        {
            "kind": "node",
            "node": "head",
            "role": "trainer",
            "price_class": "on_demand",
            "state": "ready",
            "why": "",
        },
        {
            "kind": "node",
            "node": "spot-0",
            "role": "explorer",
            "price_class": "spot",
            "state": "ready",
            "why": "",
        },
        {"kind": "eval", "iteration": 0, "score": 0.59, "exact": 0.25},
    ]
    for i in range(1, min(iterations, 3) + 1):
        events += [{"kind": "phase", "iteration": i - 1, "phase": phase} for phase in progress.PHASES]
        picture = grids.write_grid(folder, i, [np.full((16, 32), 40 * i, np.uint8)], ["482"], title=f"it {i}")
        events += [
            {"kind": "grid", "iteration": i, "path": str(picture.relative_to(folder))},
            {
                "kind": "iteration",
                "iteration": i - 1,
                "reward_mean": 0.4 + 0.1 * i,
                "loss": 0.01,
                "images_per_s": 21.4,
                "drafts": 32,
                "spot_busy_share": 0.94,
                "wall_s": 4.0,
                "usd": 0.01 * i,
            },
            {"kind": "eval", "iteration": i, "score": 0.59 + 0.08 * i, "exact": 0.3},
            {"kind": "checkpoint", "iteration": i, "path": f"checkpoints/{i}"},
        ]
        if i == 2:
            events += [
                {"kind": "node", "node": "spot-0", "state": "lost", "why": "killed without notice"},
                {"kind": "warning", "text": "prompt [bold]\x1b[31m<script>alert(1)</script> was empty"},
                {"kind": "node", "node": "spot-0", "state": "back", "why": ""},
            ]
    return events


def plan(gpus: str, *, spot_ratio: float = 0.75, infra: str | None = None) -> Plan:
    """A real plan over two made-up instance types of one region."""
    from spotlight.core import capacity

    calls.append({"plan": gpus, "spot_ratio": spot_ratio, "infra": infra})
    if before_plan:
        raise before_plan[0]
    common = {"gpu": "H100", "gpus": 8, "cloud": "aws", "region": "us-east-1", "instance_type": "p5.48xlarge"}
    offers = [
        capacity.Offer(
            **common, zone="", price_class="on_demand", usd_per_h=Decimal("55.04"), source="a table"
        ),
        capacity.Offer(**common, zone="us-east-1a", price_class="spot", usd_per_h=Decimal("17.2")),
    ]
    return capacity.make_plan(capacity.parse_gpus(gpus), spot_ratio, offers)


def launch(
    config: RunConfig,
    plan: Plan,
    *,
    store: str,
    name: str | None = None,
    base_name: str = "run",
    image: str = "",
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Say that machines are asked for."""
    calls.append({"config": config, "launch": plan, "store": store, "name": name, "image": image})
    if on_text:
        on_text("asking aws for od0")
    return name or base_name


def down(run: str) -> int:
    """Two machines were there."""
    if not run_dir(run).is_dir():
        raise NotFoundError(f"no run {run!r}")
    return 2


def export(
    run: str,
    *,
    out: Path,
    merged: bool = False,
    live: bool = False,
    checkpoint: int | None = None,
    push: str | None = None,
) -> dict[str, Any]:
    """Write nothing."""
    calls.append(
        {"run": run, "out": out, "merged": merged, "live": live, "checkpoint": checkpoint, "push": push}
    )
    address = f"https://hub.example/{push}" if push else None
    return {"path": str(out / "transformer"), "run": run, "iteration": checkpoint or 3, "pushed_to": address}


def sample(run: str, prompt: str, *, out: Path, seed: int = 0) -> Path:
    """Write a grey picture."""
    import numpy as np

    if not run_dir(run).is_dir():
        raise NotFoundError(f"no run {run!r}")
    grids.write_png(grids.contact_sheet([np.full((16, 32), seed % 256, np.uint8)], [prompt]), out)
    return out


def verify(run: str, *, replay: bool = False) -> list[Verdict]:
    """Whatever the test has put into `verdicts`."""
    calls.append({"verify": run, "replay": replay})
    return list(verdicts)


def status(run: str | None = None) -> status_model.Status:
    """The real status model over the run folder."""
    return status_model.load(run_dir(run) if run else status_model.newest(home()), time.time())


def check_cloud(store: str = "", gpus: str = "") -> list[Check]:
    """One thing is wrong."""
    calls.append({"check_cloud": store, "gpus": gpus})
    return [Check("bucket", "fail", f"{store or 'none'} refuses", "ask for access")]


def refresh(run: str, *, everything: bool = False) -> str:
    """Nothing is elsewhere."""
    calls.append({"refresh": run, "everything": everything})
    return ""


def report(run: str, *, out: Path | None = None) -> Path:
    """The real report."""
    from spotlight.observe import report as page

    return page.write(run_dir(run), out)


def install() -> None:
    """Take the place of `spotlight.api` in this process."""
    sys.modules["spotlight.api"] = sys.modules[__name__]
    spotlight.api = sys.modules[__name__]  # type: ignore[attr-defined]
