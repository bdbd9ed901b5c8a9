"""`spotlight launch`, `spotlight down`: rent machines for a run, and give them back."""

from __future__ import annotations

import os
import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotlight.errors import Interrupted, UserError
from spotlight_cli import complete
from spotlight_cli.render import Output, output
from spotlight_cli.train import default_name, flag_overrides

if TYPE_CHECKING:
    from spotlight.core.capacity import Plan

STORE = "SPOTLIGHT_STORE"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Run")(launch)
    app.command(rich_help_panel="Run")(down)


def launch(
    recipe: Annotated[
        str,
        typer.Argument(help="A shipped recipe or a .yaml file.", autocompletion=complete.recipes),
    ] = "tiny",
    gpus: Annotated[str, typer.Option(metavar="TYPE:COUNT", help="e.g. H100:64, or H100:32,A100:32")] = "",
    spot_ratio: Annotated[float, typer.Option(help="Share of the GPUs that may be taken, 0 to 1.")] = 0.75,
    infra: Annotated[
        str | None, typer.Option(metavar="CLOUD[/REGION]", help="Default: the cheapest region.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help=f"Bucket prefix, s3:// or gs://; default: ${STORE}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: the recipe, numbered.")] = None,
    image: Annotated[str, typer.Option(metavar="ID", help="Machine image instead of SkyPilot's.")] = "",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; repeat as needed.")
    ] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Stop the run before it costs more.")] = None,
    max_hours: Annotated[float | None, typer.Option(help="Stop the run before it takes longer.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and create nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Post-train on rented GPUs: trainers on demand, explorers on spot machines that may be taken."""
    from spotlight import api, config

    out = output()
    if not gpus:
        raise UserError("--gpus is missing", hint="e.g. spotlight launch --gpus H100:64 --spot-ratio 0.75")
    settings = flag_overrides(overrides or [], **{"budget.usd": budget_usd, "budget.hours": max_hours})
    resolved = config.load(recipe, settings)
    plan = api.plan(gpus, spot_ratio=spot_ratio, infra=infra)
    if dry_run:
        show_plan(out, plan)
        return
    place = store or os.environ.get(STORE, "")
    if not place:
        raise UserError(
            "--store is missing", hint=f"a bucket prefix, e.g. s3://my-bucket/runs; or set {STORE}"
        )
    _confirm(out, plan, yes)
    run = api.launch(
        resolved, plan, store=place, name=name, base_name=default_name(recipe), image=image, on_text=out.say
    )
    if out.json:
        out.document({"run": run, "plan": plan_document(plan)})
    else:
        out.line(run)
        out.next_steps(
            [f"spotlight status {run} --watch", f"spotlight logs {run} -f", f"spotlight down {run}"]
        )


def down(
    run: Annotated[str, typer.Argument(help="Name of a run.", autocompletion=complete.runs)],
) -> None:
    """End all machines of a run. Exit code 0 means: the cloud's own list shows none any more."""
    from spotlight import api

    out = output()
    ended = api.down(run)
    if out.json:
        out.document({"run": run, "ended": ended, "left": 0})
    else:
        out.line(f"{run}: {ended} machines ended, none left")


def show_plan(out: Output, plan: Plan) -> None:
    """Print a plan: a document under --json, else a table with its sums."""
    if out.json:
        out.document(plan_document(plan))
        return
    columns = ["ROLE", "INFRA", "INSTANCE", "GPUS", "CLASS", "NODES", "$/H", "WHY"]
    out.table(
        columns,
        [
            (
                row.role, row.infra, row.instance_type, f"{row.gpu}:{row.gpus}", row.price_class, row.nodes,
                _usd(row.usd_per_h * row.nodes), row.why,
            )
            for row in plan.rows
        ],
    )  # fmt: skip
    share = 1 - plan.usd_per_h / plan.on_demand_usd_per_h if plan.on_demand_usd_per_h else Decimal(0)
    out.line("")
    out.pairs(
        [
            ("GPUs", f"{plan.gpus('spot')} spot + {plan.gpus('on_demand')} on-demand"),
            ("per hour now", f"{_usd(plan.usd_per_h)}, at most {_usd(plan.ceiling_usd_per_h)}"),
            ("on-demand only", f"{_usd(plan.on_demand_usd_per_h)}; the plan is {share:.0%} below that"),
            ("prices", plan.source),
        ]
    )


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as plain values; money in dollars per hour."""
    rows = [
        {
            "role": row.role,
            "infra": row.infra,
            "zones": list(row.zones),
            "instance_type": row.instance_type,
            "gpu": row.gpu,
            "gpus_per_node": row.gpus,
            "price_class": row.price_class,
            "nodes": row.nodes,
            "usd_per_h": float(row.usd_per_h),
            "ceiling_usd_per_h": float(row.ceiling_usd_per_h),
            "why": row.why,
        }
        for row in plan.rows
    ]
    return {
        "rows": rows,
        "gpus": {"spot": plan.gpus("spot"), "on_demand": plan.gpus("on_demand")},
        "usd_per_h": float(plan.usd_per_h),
        "ceiling_usd_per_h": float(plan.ceiling_usd_per_h),
        "on_demand_usd_per_h": float(plan.on_demand_usd_per_h),
        "prices": plan.source,
    }


def _confirm(out: Output, plan: Plan, yes: bool) -> None:
    if not out.json and not out.quiet:
        show_plan(out, plan)
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError("this costs money and nobody can be asked", hint="add --yes")
    if not typer.confirm(f"Rent these for {_usd(plan.usd_per_h)}/h?", default=False, err=True):
        raise Interrupted("not launched")


def _usd(value: Decimal) -> str:
    return f"${value:,.2f}"
