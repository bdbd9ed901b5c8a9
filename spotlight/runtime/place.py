"""What the actors of a run are told: its configuration and where its bytes lie. Plain values, no classes of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlight import config
from spotlight.core.types import WeightVersion
from spotlight.rl import params
from spotlight.rl.models import ModelAdapter, load_model
from spotlight.runtime.studio import Studio
from spotlight.runtime.worker import AdmitWeights, Worker
from spotlight.store import weights
from spotlight.store.artifacts import Artifacts
from spotlight.store.objects import ObjectStore, open_store


@dataclass(frozen=True, slots=True)
class Place:
    """A run as one of its processes sees it.

    `root` is the run's folder on the head. `store` is where all its nodes read and write: a folder or a bucket.
    """

    config: config.RunConfig
    root: str
    store: str

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Place:
        """From what `tell` made. Raises ConfigError."""
        return cls(config.check(told["config"]), told["root"], told["store"])

    def tell(self) -> dict[str, Any]:
        """As plain values."""
        return {"config": self.config.model_dump(mode="json"), "root": self.root, "store": self.store}

    @property
    def folder(self) -> Path:
        """The run's folder on this host (head node only)."""
        return Path(self.root)

    def checkpoints(self) -> ObjectStore:
        """Checkpoints: with the shared data, for a head can be lost too."""
        return open_store(f"{self.store}/checkpoints")

    def artifacts(self) -> Artifacts:
        """Results of samples."""
        return Artifacts(open_store(self.store))

    def weights(self) -> weights.Weights:
        """Published versions."""
        return weights.Weights(open_store(self.store))

    def load(self) -> ModelAdapter:
        """The base model, its trainable parameters prepared."""
        adapter = load_model(self.config.model)
        params.prepare(adapter, self.config.train, seed=self.config.seed)
        return adapter

    def worker(self, *, coordinator: Any, studio: Studio, admit: AdmitWeights, **who: Any) -> Worker:
        """A worker of this run; `who` has name, node, role and watch."""
        cluster = self.config.cluster
        return Worker(
            coordinator=coordinator,
            studio=studio,
            artifacts=self.artifacts(),
            admit=admit,
            max_requests=cluster.pull_batch,
            renew_s=cluster.heartbeat_s,
            **who,
        )


def from_store(adapter: ModelAdapter, published: weights.Weights) -> AdmitWeights:
    """Fetch a version and bind it: what a node does that did not train it."""

    def admit(version: int) -> tuple[str, int]:
        tensors = published.fetch(version, base=adapter.base_id)
        live = params.trainable_parameters(adapter.transformer)
        return weights.bind(live, tensors), len(tensors)

    return admit


def told(version: WeightVersion) -> tuple[int, str, int]:
    """A version as arguments of `Coordinator.publish`."""
    return version.n, version.digest, version.num_tensors
