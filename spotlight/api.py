"""The use-cases behind the command line; fit to be called from a notebook as well.

Nothing here prints. Every function raises a SpotlightError for whatever a user can cause or meet.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight import config as configuration
from spotlight import names, strict_yaml
from spotlight.config import RunConfig
from spotlight.errors import ConfigError, NotFoundError, SpotlightError, UserError

if TYPE_CHECKING:
    from spotlight.core.capacity import Plan
    from spotlight.core.verdict import Verdict
    from spotlight.observe.cost_report import By, CostReport
    from spotlight.observe.doctor import Check
    from spotlight.observe.status import Status
    from spotlight.rl.rewards.server import RewardServer
    from spotlight.store.objects import ObjectStore

CONFIG = "config.yaml"
DOWN = "down"  # in the folder of a cloud run whose machines have been given back
OnEvent = Callable[[dict[str, Any]], None]


def train(
    config: RunConfig,
    *,
    name: str | None = None,
    base_name: str = "run",
    spot: int | None = None,
    preempt: str | None = None,
    resume: bool = False,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Train on this machine and return the summary.

    `name` must be new unless `resume`; without one, `base_name` with a number is taken (the newest such run
    when resuming). `spot` overrides the number of spot nodes; `preempt` is a trace file, `demo` or `none`.
    """
    if spot is not None:
        config = configuration.check(
            {**config.model_dump(), "cluster": {**config.cluster.model_dump(), "spot": spot}}
        )
    folder = names.run_dir(_name(base_name, resume) if name is None else name)
    _check_parts(config, here=True)
    preemptions = _preemptions(config, preempt)
    _open_folder(folder, config, resume)

    from spotlight.runtime import local_run

    return local_run.run(config, folder, preemptions=preemptions, resume=resume, on_event=on_event)


def plan(gpus: str, *, spot_ratio: float = 0.75, infra: str | None = None) -> Plan:
    """What `gpus` ("H100:64") would be rented as, and for how much now; nothing is created.

    Raises UserError, CredentialError (no SkyPilot, no login) or CapacityError (nobody offers that).
    """
    from spotlight.core import capacity
    from spotlight.provision import live, prices, skypilot

    requests = capacity.parse_gpus(gpus)
    capacity.check_ratio(spot_ratio)
    cloud, region = skypilot.parse_infra(infra)
    offers = skypilot.offers(requests, cloud, region)
    return live.plan_at_prices_of_now(requests, spot_ratio, offers, prices.cache(names.home()), time.time())


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
    """Rent the plan's machines and start the run on them; returns its name. The head rents the spot nodes itself.

    `store` is a bucket prefix (s3://, gs://) that the run gets a folder in; `image` a machine image. When this fails or
    is interrupted no machine is left, or the error says which command ends them.
    """
    from spotlight.provision import rent
    from spotlight.provision.launch import Launch

    if not store.startswith(("s3://", "gs://")):
        raise ConfigError(
            f"a cloud run needs a bucket, not {store[:60]!r}",
            hint="--store s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
        )
    spot_rows = [row for row in plan.rows if row.price_class == "spot"]
    num_spot = sum(row.nodes for row in spot_rows)
    gpus = min((row.gpus for row in spot_rows), default=1)
    cluster = {**config.cluster.model_dump(), "spot": num_spot, "gpus_per_node": gpus}
    cluster["start_with"] = min(cluster["start_with"], num_spot)
    config = configuration.check({**config.model_dump(), "cluster": cluster})
    folder = names.run_dir(_name(base_name, False) if name is None else name)
    place = f"{store.rstrip('/')}/{folder.name}"
    launched = Launch(run=folder.name, store=place, rows=plan.rows, image=image).check()
    _check_parts(config, here=False)
    _check_store(store, folder.name)
    _open_folder(folder, config, resume=False)
    launched.save(folder)
    rent.bring_up(launched, folder, on_text or (lambda _: None))
    return folder.name


def down(run: str) -> int:
    """End every machine of a run and return how many there were; 0 machines are left when this returns."""
    from spotlight import books
    from spotlight.observe.progress import ProgressLog
    from spotlight.provision import rent
    from spotlight.provision.launch import Launch

    folder = _existing(run)
    ended = rent.give_back(Launch.load(folder))
    refresh(run, everything=True)
    with contextlib.suppress(SpotlightError):  # books that cannot be read are told of by those who read them
        books.ledger(folder, time.time())  # now, since clouds forget the dead within hours
    (folder / DOWN).touch()
    if status(run).state not in ("finished", "failed"):
        log = ProgressLog(folder, None)
        log({"kind": "run_failed", "code": "interrupted", "message": "taken down", "hint": None})
        log.close()
    return ended


def check_cloud(store: str = "", gpus: str = "") -> list[Check]:
    """Is the cloud side fit: logins, clock, bucket, machines that nobody remembers; with `gpus` ("H100:64") also the
    account's limits for such a plan. Takes a while: it asks the clouds.
    """
    from spotlight.observe.doctor import Check
    from spotlight.provision import health

    rows = plan(gpus).rows if gpus else ()
    findings = health.examine(names.home() / "runs", store, rows)
    return [Check(*finding) for finding in findings]  # type: ignore[arg-type]


def refresh(run: str, *, everything: bool = False) -> str:
    """Fetch what a cloud run has told since; a local run needs none. Returns why it could not be had, or ""."""
    from spotlight.provision.buckets import open_bucket
    from spotlight.provision.launch import FILE, Launch
    from spotlight.runtime import mirror

    folder = _existing(run)
    if not (folder / FILE).is_file() or (folder / DOWN).exists():
        return ""
    try:
        mirror.fetch(open_bucket(Launch.load(folder).store), folder, everything=everything)
    except SpotlightError as error:
        return error.message
    return ""


def sample(run: str, prompt: str, *, out: Path, seed: int = 0) -> Path:
    """Draw one image with what a run has learned and write it as PNG."""
    folder = _existing(run)
    if not (folder / "export").is_dir():
        raise NotFoundError(f"run {run!r} has no result yet", hint=f"spotlight status {run}")
    config = _load_config(folder)

    from PIL import Image

    from spotlight.observe.grids import write_png
    from spotlight.runtime.trainer import result_image

    pixels = result_image(folder / "export", config, prompt, seed)
    try:
        write_png(Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels), out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    return out


def export(
    run: str,
    *,
    out: Path,
    merged: bool = False,
    live: bool = False,
    checkpoint: int | None = None,
    push: str | None = None,
) -> dict[str, Any]:
    """Write what a checkpoint of a run has learned in diffusers' layout; returns path, iteration and hub address.

    The averaged weights, or the `live` ones; of a LoRA run the adapter, or the transformer it is `merged` into. `out`
    must be new or empty. `push` is a hub repository; the token is HF_TOKEN. Raises NotFoundError, IntegrityError,
    UserError, CredentialError.
    """
    folder = _existing(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there and not empty", hint="--out FOLDER names another")
    config = _load_config(folder)

    from spotlight.rl import hub
    from spotlight.rl.export import export_state
    from spotlight.store import checkpoint as checkpoints

    token = hub.check_push(push, os.environ.get("HF_TOKEN")) if push else ""
    found = checkpoints.load(_checkpoints(folder), checkpoint)
    try:
        path = export_state(found.tensors["trainer"], config, out.absolute(), live=live, merged=merged)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    title = f"Spotlight run {run}, iteration {found.step}"
    address = hub.push(out, push, token, title) if push else None
    return {"path": str(path), "run": run, "iteration": found.step, "pushed_to": address}


def serve_reward(
    reward: str, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> RewardServer:
    """A server that scores images for other machines; `serve_forever()` it. Raises ConfigError, LockError."""
    from spotlight.rl.rewards import load_reward
    from spotlight.rl.rewards.server import RewardServer

    return RewardServer(load_reward(reward), host, port, token=token)


def verify(run: str, *, replay: bool = False) -> list[Verdict]:
    """Check a run's journal against INV-1 to INV-7; with `replay`, also that the core decides the same again."""
    from spotlight.observe import verify as judge

    folder = _existing(run) / "journal"
    return [*judge.verify(folder), *([judge.replay(folder)] if replay else [])]


def status(run: str | None = None) -> Status:
    """What a run is doing, from its folder; without a name, the newest one."""
    from spotlight.observe import status as model

    folder = _existing(run) if run is not None else model.newest(names.home())
    return model.load(folder, time.time())


def report(run: str, *, out: Path | None = None) -> Path:
    """Write one self-contained HTML page about a run."""
    from spotlight.observe import report as page

    return page.write(_existing(run), out)


def cost_report(
    run: str | None = None,
    *,
    all_runs: bool = False,
    since_s: float = -math.inf,
    by: By = "price-class",
    target: float | None = None,
    live: bool = False,
    invoice: Path | None = None,
) -> CostReport:
    """What a run cost (without a name, the newest; or all runs), from its journal and its cloud's record.

    `since_s` (UTC seconds) leaves out what was before; `target` asks for the cost up to that held-out score;
    `live` asks EC2 for the spot prices that were in force instead of taking what the run recorded; `invoice` is a
    cloud's bill, whose amounts replace ours for good.
    """
    from spotlight import books
    from spotlight.observe import bill
    from spotlight.observe import status as model
    from spotlight.provision import prices
    from spotlight.provision.launch import FILE

    home = names.home()
    if all_runs:
        folders = sorted(path for path in (home / "runs").glob("*") if path.is_dir())
    else:
        folders = [_existing(run) if run is not None else model.newest(home)]
    if not folders:
        raise NotFoundError(f"no run in {home / 'runs'} yet", hint="spotlight train   starts one")
    for folder in folders:
        if (folder / FILE).is_file():
            refresh(folder.name, everything=True)
    if invoice is not None:
        books.reconcile(folders, invoice, time.time())
    book, now_s = prices.default_book(home), time.time()
    costs = [books.run_cost(folder, book, now_s, live_prices=live, tolerant=all_runs) for folder in folders]
    rented = prices.h100_prices(book)
    return bill.build(costs, prices.load_rules(), now_s, since_s=since_s, by=by, target=target, rented=rented)


def _checkpoints(folder: Path) -> ObjectStore:
    """Where a run's checkpoints are: in its folder, or in its bucket."""
    from spotlight.provision.buckets import open_bucket
    from spotlight.provision.launch import FILE, Launch

    where = Launch.load(folder).store if (folder / FILE).is_file() else str(folder)
    return open_bucket(f"{where}/checkpoints")


def _existing(run: str) -> Path:
    folder = names.run_dir(run)
    if not folder.is_dir():
        raise NotFoundError(f"no run {run!r} in {names.home() / 'runs'}", hint="spotlight status")
    return folder


def _name(base: str, resume: bool) -> str:
    """The first free name of base, base-2, base-3, ...; when resuming, the last taken one."""
    taken = base
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        if not names.run_dir(name).exists():
            return taken if resume else name
        taken = name
    raise AssertionError("unreachable")


def _check_store(store: str, run: str) -> None:
    """The bucket can be written before anything is rented, and holds no other run of that name."""
    from spotlight.provision.buckets import open_bucket

    bucket = open_bucket(f"{store.rstrip('/')}/{run}")
    if bucket.list_keys():
        raise UserError(
            f"there is a run {run!r} in {store} already", hint="another --name, or another --store"
        )
    bucket.put_new("launched", run.encode())


def _check_parts(config: RunConfig, *, here: bool) -> None:
    """Look for model and rewards and read the prompt files before anything is created. `here`: it runs here."""
    from spotlight.rl import data, registry

    registry.check_model(config.model.kind, here=here)
    for reward in (*config.reward.train, config.reward.held_out):
        registry.check_reward(reward, here=here)
    path = config.model.path or ""
    if here and path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise NotFoundError(f"model.path: there is no folder {path[:200]!r}")
    data.load(config.data.validation)
    data.batch(data.load(config.data.train), 0, config.data.prompts_per_iteration, config.seed)


def _preemptions(config: RunConfig, source: str | None) -> list[Any]:
    from spotlight.provision.base import spot_names
    from spotlight.runtime import preempt

    return preempt.load(source, iterations=config.iterations, nodes=spot_names(config.cluster.spot))


def _open_folder(folder: Path, config: RunConfig, resume: bool) -> None:
    if resume:
        if not (folder / CONFIG).is_file():
            raise NotFoundError(f"no run {folder.name!r} to resume in {folder.parent}")
        return
    if folder.exists():
        raise UserError(
            f"a run named {folder.name!r} exists already",
            hint=f"--resume to go on with it, another --name, or delete {folder}",
        )
    try:
        folder.mkdir(parents=True)
        draft = folder / f"{CONFIG}.partial"
        draft.write_text(configuration.dump(config))
        os.replace(draft, folder / CONFIG)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}",
            hint="set SPOTLIGHT_HOME to a folder of yours",
        ) from None


def _load_config(folder: Path) -> RunConfig:
    try:
        data = (folder / CONFIG).read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error.strerror}") from None
    return configuration.check(strict_yaml.parse(data, str(folder / CONFIG)))
