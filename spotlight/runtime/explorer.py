"""The actor on a spot node: drafts while the trainers train, and rolls out with all the others.

It has one GPU, or several that make an image together (`runtime/sp_group.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Explorer:
    """`prepare` loads the model, `run` serves to the end of the run. Nothing on it may be missed when it dies."""

    def __init__(
        self,
        told: Mapping[str, Any],
        coordinator: Any,
        node: str,
        notice_file: str,
        index: int = 0,
        gpus: Sequence[int] = (0,),
    ) -> None:
        self._told = told
        self._coordinator = coordinator
        self._node = node
        self._notice_file = Path(notice_file)
        self._name = f"{node}/{index}"
        self._gpus = list(gpus)
        # Before anything imports torch: this process sees its own GPUs only, counted from 0.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))

    def prepare(self) -> str:
        """Import torch, load the model and the reward; returns the worker's name."""
        import torch

        from spotlight.rl import hub
        from spotlight.rl.algorithms import load_algorithm
        from spotlight.rl.sampler import rollout_sampler
        from spotlight.runtime import sp_group
        from spotlight.runtime.notices import FileNotice, Watch, cloud_source
        from spotlight.runtime.place import Place, from_store
        from spotlight.runtime.studio import Studio

        torch.set_num_threads(1)
        place = Place.of(self._told)
        with hub.on_cpu(len(self._gpus) > 1):  # the ranks of a group have the model on their GPUs
            adapter = place.load()
        admit = from_store(adapter, place.weights())
        if len(self._gpus) > 1:
            adapter, admit = sp_group.form(
                place, adapter, name=self._name, node=self._node, gpus=len(self._gpus)
            )
        algorithm = load_algorithm(place.config.algorithm, rollout_sampler(place.config.sampler))
        self._worker = place.worker(
            coordinator=self._coordinator,
            studio=Studio(adapter, place.config, keep_trajectory=algorithm.needs_trajectory),
            admit=admit,
            name=self._name,
            node=self._node,
            role="spot",
            watch=Watch([FileNotice(self._notice_file), *cloud_source(os.environ)]),
        )
        self._worker.join()
        return self._worker.name

    def run(self) -> None:
        """Serve until the run is over."""
        self._worker.serve(lambda: False)
