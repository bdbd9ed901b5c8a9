"""The actor on a spot node: one GPU that drafts while the trainers train and rolls out with all the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Explorer:
    """`prepare` loads the model, `run` serves to the end of the run. Nothing on it may be missed when it dies."""

    def __init__(self, told: Mapping[str, Any], coordinator: Any, node: str, notice_file: str) -> None:
        self._told = told
        self._coordinator = coordinator
        self._node = node
        self._notice_file = Path(notice_file)

    def prepare(self) -> str:
        """Import torch, load the model and the reward; returns the worker's name."""
        import torch

        from spotlight.rl.algorithms import load_algorithm
        from spotlight.rl.sampler import rollout_sampler
        from spotlight.runtime.notices import FileNotice, Watch, cloud_source
        from spotlight.runtime.place import Place, from_store
        from spotlight.runtime.studio import Studio

        torch.set_num_threads(1)
        place = Place.of(self._told)
        adapter = place.load()
        algorithm = load_algorithm(place.config.algorithm, rollout_sampler(place.config.sampler))
        studio = Studio(adapter, place.config, keep_trajectory=algorithm.needs_trajectory)
        self._worker = place.worker(
            coordinator=self._coordinator,
            studio=studio,
            admit=from_store(adapter, place.weights()),
            name=f"{self._node}/0",
            node=self._node,
            role="spot",
            watch=Watch([FileNotice(self._notice_file), *cloud_source(os.environ)]),
        )
        self._worker.join()
        return self._worker.name

    def run(self) -> None:
        """Serve until the run is over."""
        self._worker.serve(lambda: False)
