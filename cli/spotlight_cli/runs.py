"""Looking at runs: `status`, `logs`, `report`, `verify`. All read the run folder alone."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotlight.errors import IntegrityError, NotFoundError
from spotlight_cli import complete
from spotlight_cli.render import Output, output

if TYPE_CHECKING:
    from spotlight.observe.status import Status

_Run = Annotated[str, typer.Argument(help="Name of a run.", autocompletion=complete.runs)]
_MaybeRun = Annotated[
    str | None, typer.Argument(help="Name of a run; default: the newest.", autocompletion=complete.runs)
]
_POLL_S = 0.5


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, logs, report, verify):
        app.command(rich_help_panel="Look")(command)


def status(
    run: _MaybeRun = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw until the run ends.")] = False,
) -> None:
    """Tell what a run is doing, with the age of each fact.

    States: running, silent (no word for two minutes), finished, failed, empty. A lost node stays listed.
    """
    from spotlight import api

    out = output()
    while True:
        _refresh(out, run)
        current = api.status(run)
        if out.json:
            out.document(current.to_dict())
            return
        if watch and sys.stdout.isatty():
            out.console().clear()
        show_status(out, current)
        if not watch or current.state in ("finished", "failed", "empty"):
            return
        time.sleep(2.0)


def _refresh(out: Output, run: str | None) -> None:
    """Have the news of a run that is elsewhere; without them, show what is here and say so."""
    from spotlight import api

    if run is not None and (why := api.refresh(run)):
        out.say(f"no news: {why}", style="yellow")


def show_status(out: Output, status: Status) -> None:
    """Print a status as a head, a table of nodes and the last events."""
    from spotlight.observe import words

    course = f"{status.iterations_done}/{status.iterations} iterations"
    phase = f", {words.PHASE_WORDS.get(status.phase, status.phase)}" if status.phase else ""
    left = f", about {words.duration(status.eta_s)} left" if status.eta_s is not None else ""
    seen = f", last heard of {words.ago(status.seen_age_s)}"
    out.line(words.clean(f"{status.run}: {status.state}, {course}{phase}{left}{seen}"))
    if status.failure:
        out.line(words.clean(f"failed: {status.failure.get('message')}"))
    out.pairs(_facts(status))
    if status.nodes:
        out.line("")
        out.table(
            ["NODE", "ROLE", "CLASS", "STATE", "SINCE", "WHY"],
            [
                (n.node, n.role or "-", n.price_class or "-", n.state, words.ago(n.age_s), n.why or "-")
                for n in status.nodes
            ],
        )
    if status.events:
        out.line("")
        for event in status.events:
            out.line(f"{words.clock(event.at_s)}  {words.clean(event.text)}")


def _facts(status: Status) -> list[tuple[str, str]]:
    from spotlight.observe import words

    course = f"{words.score(status.score_base)} → {words.score(status.score)}"
    speed = f"{words.figure(status.images_per_s)} images/s, reward {words.score(status.reward)}"
    saved = f"iteration {words.figure(status.checkpoint)}"
    rows = [
        ("held-out score", f"{course}  ({words.ago(status.score_age_s)})"),
        ("roll-out", f"{speed}  ({words.ago(status.numbers_age_s)})"),
        ("checkpoint", f"{saved}  ({words.ago(status.checkpoint_age_s)})"),
        ("preemptions", f"{status.preemptions}"),
    ]
    if status.usd is not None:
        rate = f", {words.usd(status.usd_per_h)}/h" if status.usd_per_h is not None else ""
        rows.append(("cost", f"{words.usd(status.usd)} so far{rate}"))
    return rows


def logs(
    run: _Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Start with the last N; 0: all.")] = 0,
) -> None:
    """Print what happened, one event a line; with --json one object a line."""
    from spotlight.names import run_dir
    from spotlight.observe import progress, words

    folder = run_dir(run)
    if not folder.is_dir():
        raise NotFoundError(f"no run {run!r}", hint="spotlight status   shows the newest run")
    out, state = output(), progress.Progress()
    _refresh(out, run)
    for number, batch in enumerate(progress.batches(folder)):
        for event in batch:
            state.apply(event)
        told = [event for event in batch if out.json or words.describe(event) is not None]
        for event in told[-lines:] if lines and number == 0 else told:
            _tell(out, event)
        if state.ended or not follow:
            return
        time.sleep(_POLL_S)
        _refresh(out, run)


def _tell(out: Output, event: dict[str, Any]) -> None:
    from spotlight.observe import words

    text = words.describe(event)
    if out.json:
        out.line(json.dumps(event, ensure_ascii=False))
    elif text is not None:
        out.line(f"{words.clock(event.get('at_s'))}  {text}")
    sys.stdout.flush()


def report(
    run: _Run,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file; default: in the run folder.", dir_okay=False),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: curves, nodes and kills, samples."""
    from spotlight import api

    out = output()
    path = api.report(run, out=out_file)
    if out.json:
        out.document({"path": str(path)})
    else:
        out.line(str(path))


def verify(
    run: _Run,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also replay the journal through the scheduler.")
    ] = False,
) -> None:
    """Check a run's journal against the invariants; exit 6 when one is broken."""
    from spotlight import api

    out = output()
    verdicts = list(api.verify(run, replay=replay))
    broken = [verdict for verdict in verdicts if not verdict.ok]
    if broken:
        # On failure stdout stays empty: the verdicts are the error's message.
        text = "\n".join(f"{v.name}: {'; '.join(map(str, v.problems[:3]))}" for v in broken)
        raise IntegrityError(
            f"{len(broken)} of {len(verdicts)} checks failed\n{text}", hint=f"spotlight logs {run}"
        )
    if out.json:
        out.document([{"name": v.name, "ok": v.ok, "checked": v.checked} for v in verdicts])
    else:
        out.table(["CHECK", "VERDICT", "WHAT"], [(v.name, "ok", v.checked) for v in verdicts])
