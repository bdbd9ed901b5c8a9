"""The one configuration tree: a recipe in YAML, overrides `a.b=c`, checked and saved with the run.

A key that does not exist is an error that names the nearest one that does. A value exists once; whatever
follows from others is a property, not a second field.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from spotlight import strict_yaml
from spotlight.errors import ConfigError, NotFoundError

MAX_RECIPE_BYTES = 1_000_000


class Section(BaseModel):
    """A part of the tree: immutable, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false (in YAML also yes, no, on, off) are no numbers")
        return value


class ModelConfig(Section):
    """Which diffusion transformer, and how it is held."""

    kind: str = Field("tiny", description="adapter name: tiny, sd3, qwen_image, flux, ...")
    path: str | None = Field(None, description="local folder or hub id; empty: the adapter's own default")
    revision: str | None = Field(None, description="hub revision to pin")
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    height: int = Field(16, ge=8, le=4096, description="image height in pixels")
    width: int = Field(32, ge=8, le=4096, description="image width in pixels")
    attention_backend: str | None = Field(None, description="a name that diffusers' dispatcher knows")
    gradient_checkpointing: bool = False
    autocast: bool = Field(
        False, description="multiply in bf16 while weights stay in `dtype`: for full fine-tuning in fp32"
    )
    compile: bool = Field(False, description="torch.compile the transformer's blocks")
    offload_text_encoder: bool = Field(False, description="keep text encoders on the CPU")
    embedding_cache: str | None = Field(
        None, description="folder that keeps prompt embeddings, to be shared by nodes; empty: memory only"
    )
    text_tokens: int = Field(0, ge=0, le=1024, description="longest prompt in tokens; 0: the model's own")
    t5: bool = Field(True, description="SD3: use its T5 encoder, if the checkpoint has one")
    guidance: float = Field(3.5, ge=0, description="guidance input of distilled models (FLUX.1-dev)")
    vae_tiling: bool = Field(False, description="decode large images tile by tile")


class SamplerConfig(Section):
    """How a latent is denoised. A draft uses the same sampler as its final."""

    kind: Literal["sde", "cps", "ode"] = "sde"
    steps: int = Field(4, ge=1, le=1000, description="denoising steps of a roll-out")
    eval_steps: int = Field(4, ge=1, le=1000, description="denoising steps of a validation image (ODE)")
    noise_level: float = Field(0.7, ge=0, le=2, description="a in the SDE / CPS step")
    window_start: int = Field(0, ge=0, description="first stochastic step")
    window_size: int = Field(0, ge=0, description="number of stochastic steps; 0: all but the last")
    shift: float = Field(1.0, gt=0, description="timestep shift of the sigma schedule")
    shift_terminal: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="smallest sigma before 0 that the schedule is stretched to; 0: not stretched",
    )
    cfg: float = Field(1.0, ge=1, description="classifier-free guidance scale; 1: none")

    @model_validator(mode="after")
    def _window_fits(self) -> SamplerConfig:
        stop = self.window_start + max(self.window_size, 1)
        if (self.window_start or self.window_size) and stop >= self.steps:
            raise ValueError(
                f"the window takes in step {stop} of {self.steps}, but the last step never draws noise: "
                "window_start + window_size must be below steps"
            )
        if self.kind == "cps" and self.noise_level > 1:
            raise ValueError(f"noise_level {self.noise_level} is above 1, where CPS would subtract noise")
        return self


class DataConfig(Section):
    """Prompts. A group is one row of the training file."""

    train: str = Field("builtin:digits-train", description="file (.txt .jsonl .csv .parquet) or builtin:NAME")
    validation: str = Field("builtin:digits-held-out", description="file or builtin:NAME, never trained on")
    validation_size: int = Field(96, ge=1, description="validation rows used, from the first")
    prompts_per_iteration: int = Field(8, ge=1, le=4096)
    group_size: int = Field(8, ge=1, le=1024, description="k: samples of one prompt that are trained on")
    shuffle: bool = True
    favour_informative: bool = Field(
        False, description="draw long zero-variance prompts less often (never drops any)"
    )


class RewardConfig(Section):
    """What is trained on and what is reported."""

    train: dict[str, float] = Field({"ocr_soft": 1.0}, description="reward name -> weight")
    held_out: str = Field("ocr", description="the validation score; never trained on")

    @model_validator(mode="after")
    def _there_is_something_to_train_on(self) -> RewardConfig:
        if not any(self.train.values()):
            raise ValueError("train needs a reward with a weight other than 0, as {ocr_soft: 1.0}")
        return self


class AlgorithmConfig(Section):
    """The loss."""

    kind: Literal["flow_grpo", "nft", "grpo_guard", "awm"] = "flow_grpo"
    clip: float = Field(2e-3, gt=0, description="ratio clip, for mean log-probs at this resolution")
    normalise: Literal["group", "batch"] = Field(
        "group", description="whose standard deviation divides the advantage"
    )
    advantage_clip: float = Field(5.0, gt=0)
    kl: float = Field(0.0, ge=0, description="weight of the KL term against the base model")
    steps_trained: int = Field(
        0, ge=0, description="denoising steps drawn per sample and update; 0: all trainable"
    )
    nft_beta: float = Field(1.0, gt=0, le=10)
    nft_old_decay_rate: float = Field(
        0.001, ge=0, description="old <- d old + (1-d) theta, d = min(rate * (iteration - delay), max)"
    )
    nft_old_decay_delay: int = Field(
        0, ge=0, description="iterations in which the old weights do not lag (d = 0)"
    )
    nft_old_decay_max: float = Field(0.5, ge=0, lt=1)


class TrainConfig(Section):
    """Optimisation."""

    mode: Literal["full", "lora"] = "full"
    lora_rank: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lr: float = Field(3e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    updates: int = Field(2, ge=1, description="optimiser steps per iteration")
    micro_batch: int = Field(32, ge=1, description="samples per forward")
    max_grad_norm: float = Field(1.0, gt=0)
    ema: float = Field(
        0.8, ge=0, lt=1, description="decay of the averaged weights that are evaluated and exported"
    )
    ratio_tolerance: float = Field(
        1e-4, ge=0, description="largest |ratio - 1| at the first update; beyond it stop"
    )
    max_bad_steps: int = Field(5, ge=1, description="non-finite steps in a row before the run stops")


class ExploreConfig(Section):
    """Seed exploration on idle spot GPUs."""

    policy: Literal["none", "uniform", "std", "variance", "best_worst", "planner"] = "planner"
    phi: Literal["identity", "sqrt", "cap"] = "identity"
    max_drafts: int = Field(64, ge=1, le=4096, description="most drafts of one prompt")
    fixed_drafts: int = Field(
        0, ge=0, description="exactly this many per prompt, waited for; 0: what time allows"
    )
    draft_steps: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = Field(
        (), description="draft step counts to choose from; empty: the sampler's own"
    )
    control_share: float = Field(
        0.02, ge=0, le=0.5, description="share of kept seeds drawn at random, to measure rho"
    )
    min_rho: float = Field(
        0.3, ge=-1, le=1, description="below this rank correlation exploration switches itself off"
    )


class ClusterConfig(Section):
    """Machines of a local run and the failure detector of any run."""

    spot: int = Field(2, ge=0, le=512, description="spot nodes")
    trainers: int = Field(
        0, ge=0, le=1024, description="training processes; 0: one on every on-demand GPU (locally: one)"
    )
    gpus_per_node: int = Field(1, ge=1, le=64, description="GPUs of a spot node (a launch sets it)")
    sp_degree: int = Field(
        1, ge=0, le=64, description="GPUs that make one image together; 0: what the cost model says"
    )
    start_with: int = Field(0, ge=0, description="spot nodes that must be ready before the first iteration")
    heartbeat_s: float = Field(1.0, gt=0, le=60)
    dead_after_s: float = Field(3.0, gt=0, le=600)
    respawn_s: float = Field(5.0, ge=0, description="a lost local spot node comes back after this long")
    pull_batch: int = Field(8, ge=1, le=1024, description="most requests a worker takes at once")
    max_draft_lag: int = Field(1, ge=0, le=8, description="weight versions a draft may be old")

    @model_validator(mode="after")
    def _detector_is_patient(self) -> ClusterConfig:
        if self.sp_degree > self.gpus_per_node:
            raise ValueError(f"sp_degree is {self.sp_degree}, but a node has {self.gpus_per_node} GPUs")
        if self.start_with > self.spot:
            raise ValueError(f"start_with is {self.start_with}, but there are {self.spot} spot nodes")
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ValueError("dead_after_s must be at least two heartbeats")
        return self


class BudgetConfig(Section):
    """When to stop, cleanly and with a checkpoint."""

    usd: float | None = Field(None, gt=0)
    hours: float | None = Field(None, gt=0)


class ObserveConfig(Section):
    """Where the numbers go besides the run folder."""

    wandb_project: str | None = Field(None, description="Weights & Biases project; empty: not used")


class RunConfig(Section):
    """A whole run."""

    seed: int = Field(0, ge=0, lt=2**63)
    iterations: int = Field(30, ge=0, le=1_000_000)
    eval_every: int = Field(5, ge=1)
    checkpoint_every: int = Field(5, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    explore: ExploreConfig = ExploreConfig()
    cluster: ClusterConfig = ClusterConfig()
    budget: BudgetConfig = BudgetConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _noise_can_explore(self) -> RunConfig:
        needs_noise = self.algorithm.kind in ("flow_grpo", "grpo_guard")
        silent = self.sampler.kind == "ode" or self.sampler.noise_level == 0 or self.sampler.steps == 1
        if needs_noise and silent:
            raise ValueError(
                f"{self.algorithm.kind} needs a stochastic sampler: in an ODE, at noise level 0 or in the last "
                "step nothing is explored and log-probabilities do not exist; set sampler.kind=sde, "
                "sampler.noise_level above 0 and sampler.steps above 1, or algorithm.kind=nft"
            )
        return self


def load(recipe: str | Path = "tiny", overrides: Sequence[str] = ()) -> RunConfig:
    """Read a shipped recipe by name or a YAML file by path, apply `a.b=c` overrides, check.

    Raises ConfigError (unknown key with the near miss, bad value, bad YAML) or NotFoundError (no such recipe).
    """
    tree = _read_recipe(str(recipe))
    for text in overrides:
        _override(tree, text)
    return check(tree)


def check(tree: Mapping[str, Any]) -> RunConfig:
    """Build the checked tree from plain data. Raises ConfigError."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None


def recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("spotlight") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML, fit to be loaded again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_recipe(recipe: str) -> dict[str, Any]:
    if recipe in recipes():
        return strict_yaml.parse(
            (resources.files("spotlight") / "recipes" / f"{recipe}.yaml").read_bytes(), recipe
        )
    path = Path(recipe)
    if not recipe.endswith((".yaml", ".yml")):
        near = difflib.get_close_matches(recipe, recipes(), 1)
        raise ConfigError(
            f"unknown recipe {recipe[:80]!r}",
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"known: {', '.join(recipes())}; or a path to a .yaml file",
        )
    if not path.is_file():
        raise NotFoundError(f"no recipe file {recipe[:200]!r}")
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise ConfigError(f"{recipe}: larger than {MAX_RECIPE_BYTES} bytes; is this a recipe?")
    return strict_yaml.parse(path.read_bytes(), recipe)


def _override(tree: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"bad override {text[:80]!r}", hint="write --set section.key=value")
    try:
        written = f"value: {value}".encode()
        key.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"bad override {text[:80]!a}: not UTF-8") from None
    parsed = strict_yaml.parse(written, f"--set {key}").get("value")
    *sections, leaf = key.strip().split(".")
    for name in sections:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {key}: {name!r} is a value, not a section")
    if isinstance(parsed, dict) and isinstance(tree.get(leaf), dict) and leaf != "train":
        tree[leaf] = {**tree[leaf], **parsed}
    else:
        tree[leaf] = parsed


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors()[:5]:
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"unknown key {path!r}{_near_miss(problem['loc'])}"
        else:
            shown = json.dumps(problem["input"], default=str, ensure_ascii=False)[:60]
            text = problem["msg"].removeprefix("Value error, ")
            yield (
                f"{path}: {text} (got {shown})"
                if path and not isinstance(problem["input"], dict)
                else f"{path}: {text}".lstrip(": ")
            )


def _near_miss(loc: Sequence[int | str]) -> str:
    fields = dict(RunConfig.model_fields)
    everywhere = list(keys())
    for part in loc[:-1]:
        annotation = fields[str(part)].annotation if str(part) in fields else None
        fields = dict(getattr(annotation, "model_fields", {}))
    near = difflib.get_close_matches(str(loc[-1]), list(fields), 1)
    if near:
        return f"; did you mean {'.'.join([*map(str, loc[:-1]), near[0]])!r}?"
    elsewhere = [key for key in everywhere if key.split(".")[-1] == str(loc[-1])]
    return f"; did you mean {elsewhere[0]!r}?" if elsewhere else f"; known here: {', '.join(fields)}"


def keys() -> Iterator[str]:
    """Every dotted key of the tree, in order."""
    for name, field in RunConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner is None:
            yield name
        else:
            yield from (f"{name}.{key}" for key in inner)
