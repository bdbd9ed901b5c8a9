"""`spotlight cost-report`: what runs cost, and what is and is not known about it."""

from __future__ import annotations

import csv
import math
import re
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotlight.errors import UserError
from spotlight_cli import complete
from spotlight_cli.render import Output, output

if TYPE_CHECKING:
    from spotlight.observe.cost_report import CostReport, ScoreCost

_UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class By(StrEnum):
    """What the lines of the report are."""

    PRICE_CLASS = "price-class"
    ROLE = "role"
    ZONE = "zone"
    PHASE = "phase"
    NODE = "node"
    RUN = "run"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cost-report", rich_help_panel="Look")(cost_report)


def cost_report(
    run: Annotated[
        str | None, typer.Argument(help="Name of a run; default: the newest.", autocompletion=complete.runs)
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="All runs on this machine.")] = False,
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 90m, 24h, 7d, or 2026-03-02T10:00+01:00.")
    ] = None,
    by: Annotated[
        By, typer.Option(help="What the lines are; they always add up to the total.")
    ] = By.PRICE_CLASS,
    target: Annotated[float | None, typer.Option(help="Also: dollars until this held-out score.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask EC2 for the spot prices that were in force.")
    ] = False,
    invoice: Annotated[
        Path | None,
        typer.Option("--bill", metavar="FILE", help="AWS Cost and Usage Report (CSV): what was charged."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Lines and total as CSV.")] = False,
) -> None:
    """Tell what a run cost: total last, with the source and date of every price.

    Amounts are estimates until a machine is reconciled with the cloud's bill, once for good, by --bill.
    """
    from spotlight import api

    out = output()
    if run is not None and all_runs:
        raise UserError("a run and --all exclude each other")
    if as_csv and out.json:
        raise UserError("--csv and --json exclude each other")
    since_s = -math.inf if since is None else parse_since(since, time.time())
    report = api.cost_report(
        run, all_runs=all_runs, since_s=since_s, by=by.value, target=target, live=live, invoice=invoice
    )
    if out.json:
        out.document(report.to_dict())
    elif as_csv:
        _csv(report)
    else:
        show(out, report)


def parse_since(text: str, now_s: float) -> float:
    """UTC seconds of "24h" ago, or of an ISO time with its offset from UTC. Raises UserError."""
    from spotlight.core.cost import utc_seconds

    if age := re.fullmatch(r"(\d{1,6})([mhdw])", text):
        return now_s - int(age[1]) * _UNITS_S[age[2]]
    try:
        return utc_seconds(text)
    except ValueError as error:
        raise UserError(
            f"--since {text[:40]!r}: {error}", hint="90m, 24h, 7d, or 2026-03-02T10:00+01:00"
        ) from None


def show(out: Output, report: CostReport) -> None:
    """Print the facts about a report, then its lines, the total last."""
    out.pairs(list(_facts(report)))
    out.line("")
    rows = [
        (line.name, f"{line.gpu_hours:.2f}", _lower(usd, line.unknown))
        for line, usd in zip(report.lines, report.line_usd, strict=True)
    ]
    hours = sum(line.gpu_hours for line in report.lines)
    total = ("total", f"{hours:.2f}", _lower(report.total_usd, bool(report.unpriced)))
    out.table([report.by.upper(), "GPU-HOURS", "USD"], [*rows, total])


def _csv(report: CostReport) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["name", "gpu_hours", "usd", "lower_bound"])
    for line, usd in zip(report.lines, report.line_usd, strict=True):
        writer.writerow([line.name, f"{line.gpu_hours:.6f}", usd, line.unknown])
    hours = sum(line.gpu_hours for line in report.lines)
    writer.writerow(["total", f"{hours:.6f}", report.total_usd, bool(report.unpriced)])


def _facts(report: CostReport) -> Iterator[tuple[str, str]]:
    from spotlight.core.money import cents, usd_of

    yield "runs" if len(report.runs) > 1 else "run", ", ".join(report.runs)
    if report.estimate:
        yield (
            "amounts",
            f"estimated; {report.reconciled} of {report.machines} machines reconciled with a bill",
        )
    else:
        yield "amounts", "as billed by the cloud" if report.machines else "no machine was rented"
    spot, on_demand = cents((report.spot_units, report.on_demand_units))
    yield "spot / on-demand", f"${spot} / ${on_demand}"
    paid = zip(report.phases, cents(list(report.phases.values())), strict=True)
    yield "for", ", ".join(f"{phase} ${usd}" for phase, usd in paid if usd) or "nothing"
    if report.failed_launches:
        yield "failed launches", str(report.failed_launches)
    if report.counterfactual_units:
        saved, full = usd_of(report.saved_units), usd_of(report.counterfactual_units)
        share = saved / full
        word = f"saved ${saved:.2f} ({share:.0%})" if saved >= 0 else f"${-saved:.2f} dearer"
        yield "spot against", f"on-demand ${full:.2f} for the same hours: {word}"
    if report.saved_unknown:
        yield "", f"not compared, a price is missing: {', '.join(report.saved_unknown[:5])}"
    if report.rented_units is not None:
        yield "on rented H100s", f"${usd_of(report.rented_units):.2f} (AWS p5.48xlarge, one GPU each)"
    for score in report.scores:
        yield "held-out score", _score(score, report.target)
    if report.unpriced:
        yield "NO PRICE KNOWN", f"{', '.join(report.unpriced[:5])}: the total is a lower bound"
    for used in report.prices:
        place = "/".join(part for part in (used.market.cloud, used.market.zone or used.market.region) if part)
        changes = f", {used.changes} changes" if used.changes else ""
        assumed = ", also taken for the time before" if used.assumed else ""
        yield (
            "price",
            (
                f"{place} {used.market.instance_type} {used.market.price_class.replace('_', '-')} "
                f"${used.usd_per_h:f}/h ({used.source}, {used.as_of or 'no date'}{changes}{assumed})"
            ),
        )
    for note in report.notes:
        yield "note", note
    yield "not included", "; ".join(report.not_included)


def _score(score: ScoreCost, target: float | None) -> str:
    gain = f"${score.usd_per_point:.2f} per +0.01" if score.usd_per_point is not None else "no gain"
    text = f"{score.run}: {score.first:.3f} → {score.last:.3f}, {gain}"
    if target is None:
        return text
    reached = (
        f"${score.usd_to_target:.2f} to {target:g}"
        if score.usd_to_target is not None
        else f"{target:g} not reached"
    )
    return f"{text}, {reached}"


def _lower(usd: object, lower_bound: bool) -> str:
    return f"≥ {usd}" if lower_bound else str(usd)
