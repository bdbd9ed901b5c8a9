"""A worker: pulls requests under a lease, makes them, commits. The compute thread and its faithful companion.

    register -> admit the published weights -> pull -> denoise -> pull, the results in hand ...
                 ^ whenever a newer version is out   ^ every step is saved in the background

The companion thread renews the leases, delivers the states and passes on interruption notices, so that a long
step never looks like a death. What it hears (leases to drop, steps to stop at) the compute thread acts on
before its next denoising step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from spotlight.core import events as ev
from spotlight.core.types import Outcome, Request
from spotlight.errors import CommError, IntegrityError, NotFoundError
from spotlight.rl.denoise import DenoiseState
from spotlight.runtime.notices import Watch
from spotlight.runtime.remote import get
from spotlight.runtime.studio import Picture, Shot, Studio
from spotlight.store.artifacts import Artifacts

PULL_S = 2.0  # a long poll; an idle worker asks again after so long
ANSWER_S = 30.0  # a coordinator that takes longer is gone

Result = tuple[int, dict[str, Any]]  # token and encoded outcome; a refusal needs no answer: another's counts


class AdmitWeights(Protocol):
    """Binds a published version. Returns (digest read back, number of tensors bound)."""

    def __call__(self, version: int) -> tuple[str, int]:
        """Raises NotFoundError if it is collected already, IntegrityError if it is not what was published."""
        ...


@dataclass(slots=True)
class _Lease:
    """A request in hand."""

    token: int
    shot: Shot
    resume_step: int
    step: int
    stop_at: int | None = None
    dropped: bool = False


@dataclass(slots=True)
class _Desk:
    """What the two threads share, under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: dict[int, _Lease] = field(default_factory=dict)
    unsaved: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    fenced: bool = False


class Worker:
    """One GPU (or one SP group) that serves requests until told to stop.

    `renew_s` is the time between heartbeats; `watch` tells of interruption notices (None on nodes that get
    none).
    """

    def __init__(
        self,
        *,
        name: str,
        node: str,
        role: str,
        coordinator: Any,
        studio: Studio,
        artifacts: Artifacts,
        admit: AdmitWeights,
        max_requests: int,
        renew_s: float,
        watch: Watch | None = None,
    ) -> None:
        self.name, self.node, self.role = name, node, role
        self._coordinator = coordinator
        self._studio = studio
        self._artifacts = artifacts
        self._admit = admit
        self._max_requests = max_requests
        self._renew_s = renew_s
        self._watch = watch
        self._desk = _Desk()
        self._epoch = -1
        self._version: int | None = None
        self._wake = threading.Event()

    # ------------------------------------------------------------------------------------ compute thread

    def join(self) -> None:
        """Register, admit the current weights and begin to renew. Once, before `serve`."""
        self._register()
        threading.Thread(target=self._accompany, daemon=True, name=f"{self.name}-companion").start()

    def serve(self, until: Callable[[], bool]) -> None:
        """Work until `until()` or the coordinator says that the run is over. May be called again."""
        results: list[Result] = []
        while not until():
            reply = self._call("pull", self.name, self._epoch, self._max_requests, PULL_S, results)
            results = []
            if reply["stop"]:
                return
            if self._desk.fenced or reply["fenced"]:
                self._register()
            elif reply["grants"]:
                results = self._work(reply["grants"])
            elif reply["version"] is not None and reply["version"] != self._version:
                self._bind(reply["version"])
        for token, outcome in results:
            self._call("commit", token, outcome)

    def end_pull(self) -> None:
        """From another thread: let a pull that waits return now."""
        self._coordinator.end_pull.remote(self.name, self._epoch)

    def _register(self) -> None:
        reply = self._call("register", self.name, self.node, self.role)
        with self._desk.lock:
            self._desk.leases.clear()
            self._desk.unsaved.clear()
            self._desk.fenced = False
        self._epoch, self._version = reply["epoch"], None
        if reply["version"] is not None:
            self._bind(reply["version"])

    def _bind(self, version: int) -> None:
        try:
            digest, num_tensors = self._admit(version)
        except NotFoundError:
            return  # a newer one replaced it meanwhile; the next pull says which
        reply = self._call("admitted", self.name, self._epoch, version, digest, num_tensors)
        if reply["fenced"]:
            self._desk.fenced = True
        elif reply["accepted"]:
            self._version = version
        else:
            raise IntegrityError(f"weights v{version} were not admitted: {reply['reason']}")

    def _work(self, grants: Sequence[Mapping[str, Any]]) -> list[Result]:
        """Make what was granted; the results, stored but not yet reported."""
        began = time.monotonic()
        leases = self._take(grants)
        try:
            states = self._studio.start([lease.shot for lease in leases])
        except IntegrityError as error:
            self._give_up(leases, error.message)
            return []
        finished = self._denoise(leases, states)
        live = [(lease, state) for lease, state in finished if not lease.dropped]
        results: list[Result] = []
        if live:
            pictures = self._studio.finish([lease.shot for lease, _ in live], [state for _, state in live])
            share_s = (time.monotonic() - began) / len(live)
            results = [
                (lease.token, ev.encode(self._outcome(lease, picture, share_s)))
                for (lease, _), picture in zip(live, pictures, strict=True)
            ]
        self._forget(leases)
        return results

    def _take(self, grants: Sequence[Mapping[str, Any]]) -> list[_Lease]:
        leases = []
        for grant in grants:
            request: Request = ev.decode(grant["request"])
            shot = Shot(request, grant["version"], grant["state"])
            step = grant["resume_step"]
            leases.append(_Lease(grant["token"], shot, step, step))
        with self._desk.lock:
            self._desk.leases = {lease.token: lease for lease in leases}
        return leases

    def _denoise(self, leases: list[_Lease], states: list[DenoiseState]) -> list[tuple[_Lease, DenoiseState]]:
        """Take all to the end, but those that must be dropped or handed over on the way."""
        going = list(zip(leases, states, strict=True))
        while going and any(state.step < lease.shot.request.num_steps for lease, state in going):
            by_sample = {(s.row, s.seed): lease for lease, s in going}

            def on_step(moved: list[DenoiseState], by_sample: dict[Any, _Lease] = by_sample) -> bool:
                return self._stepped([(by_sample[s.row, s.seed], s) for s in moved])

            shots = [lease.shot for lease, _ in going]
            after = self._studio.denoise(shots, [state for _, state in going], on_step)
            going = self._hand_over(list(zip([lease for lease, _ in going], after, strict=True)))
        return going

    def _stepped(self, moved: list[tuple[_Lease, DenoiseState]]) -> bool:
        """After a step: leave its states for the companion. False when some lease must stop here."""
        with self._desk.lock:
            for lease, state in moved:
                lease.step = state.step
                if state.step < lease.shot.request.num_steps:
                    self._desk.unsaved[lease.token] = (state.step, state.to_bytes())
            self._wake.set()
            return not any(_must_stop(lease) for lease, _ in moved)

    def _hand_over(self, going: list[tuple[_Lease, DenoiseState]]) -> list[tuple[_Lease, DenoiseState]]:
        """Release what has reached its agreed step, its state saved first; drop what was cancelled."""
        leaving = [(lease, state) for lease, state in going if _must_stop(lease)]
        for lease, state in leaving:
            if not lease.dropped:
                self._call("save_state", lease.token, state.step, state.to_bytes())
                self._call("release", lease.token)
        self._forget([lease for lease, _ in leaving])
        return [(lease, state) for lease, state in going if not _must_stop(lease)]

    def _outcome(self, lease: _Lease, picture: Picture, share_s: float) -> Outcome:
        """Store what training needs; what to report."""
        request = lease.shot.request
        digest = ""
        if picture.tensors:
            try:
                digest = self._artifacts.put(request.sample, lease.shot.version, picture.tensors)
            except IntegrityError:  # non-finite: nothing to train on, and the reward says so
                picture = Picture(picture.state, None, picture.info, {})
        return Outcome(
            sample=request.sample,
            kind=request.kind,
            version=lease.shot.version,
            reward=picture.reward,
            digest=digest,
            worker=self.name,
            cost_s=share_s,
            num_steps=request.num_steps - lease.resume_step,
            resumed_from=lease.resume_step,
            info=picture.info,
        )

    def _give_up(self, leases: list[_Lease], reason: str) -> None:
        for lease in leases:
            self._call("fail", lease.token, reason)
        self._forget(leases)

    def _forget(self, leases: list[_Lease]) -> None:
        with self._desk.lock:
            for lease in leases:
                self._desk.leases.pop(lease.token, None)
                self._desk.unsaved.pop(lease.token, None)

    # ------------------------------------------------------------------------------------ companion thread

    def _accompany(self) -> None:
        beat_at = time.monotonic()
        while True:
            self._wake.wait(max(beat_at - time.monotonic(), 0.0))
            self._wake.clear()
            try:
                self._deliver_states()
                if time.monotonic() >= beat_at:
                    self._pass_on_notices()
                    self._renew()
                    beat_at = time.monotonic() + self._renew_s
            except CommError:
                return  # the coordinator is gone: the compute thread meets the same and ends

    def _deliver_states(self) -> None:
        with self._desk.lock:
            batch = [(token, step, blob) for token, (step, blob) in self._desk.unsaved.items()]
            self._desk.unsaved.clear()
        if batch:
            for (token, _, _), reply in zip(batch, self._call("save_states", batch), strict=True):
                self._heard(token, cancelled=reply["cancelled"], stop_at=reply["stop_at"])

    def _renew(self) -> None:
        with self._desk.lock:
            beats = [{"token": lease.token, "step": lease.step} for lease in self._desk.leases.values()]
        reply = self._call("renew", self.name, self._epoch, beats)
        if reply["fenced"]:
            self._desk.fenced = True
            for beat in beats:
                self._heard(beat["token"], cancelled=True, stop_at=None)
            self.end_pull()
        for token in reply["cancelled"]:
            self._heard(token, cancelled=True, stop_at=None)
        for token, step in reply["stop_at"].items():
            self._heard(int(token), cancelled=False, stop_at=step)

    def _heard(self, token: int, *, cancelled: bool, stop_at: int | None) -> None:
        with self._desk.lock:
            lease = self._desk.leases.get(token)
            if lease is not None:
                lease.dropped = lease.dropped or cancelled
                lease.stop_at = stop_at if stop_at is not None else lease.stop_at

    def _pass_on_notices(self) -> None:
        if self._watch is None:
            return
        notice, withdrawn = self._watch.news()
        if notice is not None:
            self._call("notice", self.node, notice.deadline_s, notice.source)
        elif withdrawn:
            self._call("notice_withdrawn", self.node)

    def _call(self, method: str, *arguments: Any) -> Any:
        return get(getattr(self._coordinator, method).remote(*arguments), ANSWER_S)


def _must_stop(lease: _Lease) -> bool:
    return lease.dropped or (lease.stop_at is not None and lease.step >= lease.stop_at)
