"""A worker in a process of its own whose "denoising" is a hash chain: any step redone, skipped or resumed wrongly
shows in the digest, and every step that was ever done is written down beside it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import ray

from spotlight.core import events as ev
from spotlight.core.types import Outcome

RENEW_S = 0.1


def chain(sample, num_steps):
    """The digest of a whole, undisturbed trajectory."""
    state = str(sample).encode()
    for step in range(1, num_steps + 1):
        state = advanced(state, step)
    return state.hex()


def advanced(state, step):
    return hashlib.blake2b(state + bytes([step]), digest_size=16).digest()


class Explorer:
    """Pulls, steps, saves every step, commits. `steps_log` gets a line for each step done."""

    def __init__(self, coordinator, name, node, role, steps_log, step_s, batch):
        self.coordinator, self.name, self.node, self.role = coordinator, name, node, role
        self.steps_log, self.step_s, self.batch = Path(steps_log), step_s, batch
        self.lock = threading.Lock()
        self.held = {}  # token -> step
        self.cancelled, self.stop_at = set(), {}
        self.fenced = False
        self.answers = []

    def pid(self):
        return os.getpid()

    def commits(self):
        return self.answers

    def start(self):
        self.register()
        threading.Thread(target=self.beat, daemon=True).start()
        threading.Thread(target=self.work, daemon=True).start()

    def call(self, method, *args):
        return ray.get(getattr(self.coordinator, method).remote(*args))

    def register(self):
        reply = self.call("register", self.name, self.node, self.role, {})
        with self.lock:
            self.epoch, self.fenced = reply["epoch"], False
            self.held.clear()
        self.bind(reply["version"])

    def bind(self, version):
        self.version = version
        if version is not None:
            self.call("admitted", self.name, self.epoch, version, f"d{version}", 3)

    def beat(self):
        while True:
            with self.lock:
                beats = [{"token": token, "step": step} for token, step in self.held.items()]
                epoch = self.epoch
            reply = self.call("renew", self.name, epoch, beats)
            with self.lock:
                self.cancelled |= set(reply["cancelled"])
                self.stop_at |= reply["stop_at"]
                self.fenced = self.fenced or (reply["fenced"] and epoch == self.epoch)
            time.sleep(RENEW_S)

    def work(self):
        while True:
            if self.fenced:
                self.register()
            reply = self.call("pull", self.name, self.epoch, self.batch, 2.0)
            if reply["stop"]:
                return
            self.fenced = self.fenced or reply["fenced"]
            if reply["version"] != self.version:
                self.bind(reply["version"])
            with self.lock:
                self.held = {grant["token"]: grant["resume_step"] for grant in reply["grants"]}
            self.make(reply["grants"])

    def make(self, grants):
        requests = {grant["token"]: ev.decode(grant["request"]) for grant in grants}
        states = {g["token"]: g["state"] or str(requests[g["token"]].sample).encode() for g in grants}
        resumed = {g["token"]: g["resume_step"] for g in grants}
        began = time.monotonic()
        if not grants:
            return
        num_steps = next(iter(requests.values())).num_steps
        for step in range(min(resumed.values()) + 1, num_steps + 1):
            time.sleep(self.step_s)
            for token in list(states):
                if token in self.cancelled and not self.fenced:
                    del states[token]
                    continue
                states[token] = advanced(states[token], step)
                with self.steps_log.open("a") as log:
                    log.write(f"{requests[token].id} {step} {self.name}\n")
                with self.lock:
                    self.held[token] = step
                self.call("save_state", token, step, states[token])
                if self.stop_at.get(token, num_steps) <= step < num_steps:
                    self.call("release", token)
                    del states[token]
        cost_s = (time.monotonic() - began) / len(grants)
        for token, state in states.items():  # a zombie commits too: it must be refused
            request = requests[token]
            outcome = Outcome(
                request.sample, request.kind, self.version, 1.0, state.hex(), self.name, cost_s,
                num_steps - resumed[token], resumed[token],
            )  # fmt: skip
            reply = self.call("commit", token, ev.encode(outcome))
            self.answers.append((token, reply["accepted"], reply["reason"]))
        with self.lock:
            self.held.clear()
