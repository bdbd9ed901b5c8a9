"""Checkpoints: killed at every step of a save, cut short, flipped, no disk left; a changed config refused."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spotlight.errors import ConfigError, IntegrityError, RunError
from spotlight.store.checkpoint import load_latest, require_same_config, save
from spotlight.store.objects import open_store
from spotlight.store.tensors import digest


def parts(step: int) -> dict[str, dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(step)
    return {
        "model": {f"w{i}": torch.randn(8, 8, generator=rng) for i in range(3)},
        "optimizer": {"0.step": torch.tensor(float(step)), "1.exp_avg": torch.randn(64, generator=rng)},
        "empty": {},
    }


def put(root: Path, step: int, **options: int) -> Path:
    return root / save(root, step, parts(step), {"step": step, "lr": 1e-4, "name": "é"}, **options)


def check(root: Path, step: int) -> tuple[str, ...]:
    """The newest checkpoint is exactly that of `step`; returns what was passed over."""
    found = load_latest(root)
    assert found
    assert found.step == found.meta["step"] == step
    assert found.meta == {"step": step, "lr": 1e-4, "name": "é"}
    assert found.tensors.keys() == parts(step).keys()
    for part, tensors in parts(step).items():
        assert digest(found.tensors[part]) == digest(tensors)
    return found.skipped


def test_none_yet(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


def test_the_newest_is_loaded_and_the_last_ones_kept(tmp_path: Path) -> None:
    folders = [put(tmp_path, step, keep=3) for step in range(5)]
    assert check(tmp_path, 4) == ()
    assert [folder.exists() for folder in folders] == [False, False, True, True, True]


def test_not_finite_values_are_kept_to_the_bit(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0])
    save(tmp_path, 1, {"model": {"x": odd}}, {})
    found = load_latest(tmp_path)
    assert found
    assert found.tensors["model"]["x"].view(torch.int32).equal(odd.view(torch.int32))


def test_a_step_saved_twice_is_the_later_one(tmp_path: Path) -> None:
    put(tmp_path, 3)
    save(tmp_path, 3, {"model": {"x": torch.ones(1)}}, {"second": True})
    found = load_latest(tmp_path)
    assert found
    assert found.meta == {"second": True}
    assert len(list(tmp_path.glob("step-*"))) == 1


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_damaged_one_is_passed_over_and_named(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    put(tmp_path, 1)
    newest = put(tmp_path, 2)
    damage(newest / name)
    (why,) = check(tmp_path, 1)
    assert newest.name in why
    assert ("unfinished" in why) == (damage is Path.unlink)
    put(tmp_path, 2)  # and is no obstacle to saving the step again
    assert check(tmp_path, 2) == ()
    assert not newest.exists()


def refusal(root: Path) -> str | None:
    """Why step 1 is refused; None if it is loaded and right, as after a flip in JSON's white space."""
    try:
        check(root, 1)
    except IntegrityError as error:
        return error.message
    return None


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    file = put(tmp_path, 1) / "manifest.json"
    good = file.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        file.write_bytes(bad)
        why = refusal(tmp_path)
        assert why is None or "manifest" in why


def test_when_none_is_valid_the_reasons_are_given(tmp_path: Path) -> None:
    first, second = put(tmp_path, 1), put(tmp_path, 2)
    truncate(first / "model.safetensors")
    (second / "manifest.json").unlink()
    with pytest.raises(IntegrityError, match=r"no valid checkpoint: .*-0{7}2-.*unfinished.*-0{7}1-.*digest"):
        load_latest(tmp_path)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-x" / "y").write_text("mine")
    for step in range(4):
        put(tmp_path, step)
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "step-x" / "y").exists()
    assert check(tmp_path, 3) == ()


def test_later_ones_survive_the_saving_of_an_earlier_step(tmp_path: Path) -> None:
    put(tmp_path, 9)
    put(tmp_path, 3, keep=1)
    assert check(tmp_path, 9) == ()


def test_a_format_of_the_future_is_refused_not_misread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotlight.store.checkpoint._FORMAT", 2)
    put(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(IntegrityError, match="checkpoint format 2, this version reads 1"):
        load_latest(tmp_path)


@pytest.mark.parametrize(
    ("step", "names", "keep"), [(-1, ["m"], 1), (10**8, ["m"], 1), (1, ["../m"], 1), (1, ["m"], 0)]
)
def test_misuse(tmp_path: Path, step: int, names: list[str], keep: int) -> None:
    with pytest.raises(ValueError):
        save(tmp_path, step, {name: {} for name in names}, {}, keep=keep)


def test_in_a_bucket_as_in_a_folder() -> None:
    store = open_store("memory://")
    for step in range(4):
        save(store, step, parts(step), {})
    found = load_latest(store)
    assert found
    assert found.step == 3
    assert digest(found.tensors["model"]) == digest(parts(3)["model"])
    assert len({key.split("/")[0] for key in store.list_keys()}) == 2


def die_after(calls: int) -> None:
    """Kill this process at the first change of the disk after `calls` of them."""
    left = [calls]

    def counted(real: Callable) -> Callable:
        def change(*args: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return change

    for name in ("fsync", "link", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))


def test_a_manifest_goes_before_what_it_promises() -> None:
    deleted: list[str] = []

    class Watched:
        def __init__(self) -> None:
            real = open_store("memory://")
            self.url, self.get, self.put_new, self.put_if = real.url, real.get, real.put_new, real.put_if
            self.list_keys, self.real = real.list_keys, real

        def delete(self, key: str) -> None:
            deleted.append(key.split("/")[1])
            self.real.delete(key)

    store = Watched()
    for step in (1, 2):
        save(store, step, {"ema": parts(1)["model"], "model": parts(1)["model"]}, {}, keep=1)
    assert deleted == ["manifest.json", "ema.safetensors", "model.safetensors"]


def killed_at(call: int, root: Path) -> bool:
    """Save step 2 in a child that is killed (SIGKILL) right before its `call`-th change of the disk."""
    child = os.fork()
    if child == 0:
        die_after(call)
        try:
            put(root, 2)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_kill_before_any_change_of_the_disk_keeps_a_valid_checkpoint(tmp_path: Path) -> None:
    outcomes = []
    for call in range(200):
        root = tmp_path / str(call)
        for step in (0, 1):
            put(root, step)
        killed = killed_at(call, root)
        found = load_latest(root)
        assert found
        outcomes.append(found.step)
        check(root, found.step)
        put(root, 2)  # over whatever the killed save left
        assert check(root, 2) == ()
        assert len({file.parent for file in root.glob("step-*/*")}) == 2
        assert killed or found.step == 2
        if not killed:
            break
    assert not killed
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes)  # the old one up to some point, then the new one
    assert set(outcomes) == {1, 2}


SAVER = """
import sys, torch
from pathlib import Path
from spotlight.store.checkpoint import save
torch.set_num_threads(1)
for step in range(1, 10_000):
    save(Path(sys.argv[1]), step, {"model": {"w": torch.full((500_000,), float(step))}}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_time_keeps_the_last_that_was_reported(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(3):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout
        reported = 0
        for _ in range(rng.randint(2, 6)):
            reported = int(saver.stdout.readline())
        try:
            saver.wait(timeout=rng.uniform(0, 0.02))
        except subprocess.TimeoutExpired:
            saver.kill()
        rest = saver.communicate()[0].split()
        reported = int(rest[-1]) if rest else reported
        found = load_latest(tmp_path)
        assert found
        assert reported <= found.step <= reported + 1
        assert found.tensors["model"]["w"].eq(found.step).all()
        shutil.rmtree(tmp_path)


FULL_DISK = """
import os, subprocess, sys, torch
from pathlib import Path
from spotlight.errors import RunError
from spotlight.store.checkpoint import load_latest, save
root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(root)], check=True)
model = {"w": torch.ones(100_000)}
save(root, 1, {"model": model}, {}, keep=1)
for extra in ({"w": torch.ones(200_000)}, {"w": torch.ones(10_000), "big": torch.ones(10**6)}):
    try:
        save(root, 2, {"small": {"x": torch.ones(10)}, "model": extra}, {}, keep=1)
    except RunError as error:
        print(error, "|", error.hint)
    found = load_latest(root)
    assert (found.step, found.skipped) == (1, ()), found
    assert os.listdir(root / ".staged") == []
save(root, 2, {"model": {"w": torch.ones(50_000)}}, {}, keep=1)
subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
try:
    save(root, 3, {"model": model}, {})
except RunError as error:
    print(error, "|", error.hint)
assert load_latest(root).step == 2
"""


def test_a_disk_that_is_full_or_read_only_keeps_the_checkpoint(tmp_path: Path) -> None:
    """A real tmpfs of 1 MB, in a mount namespace of its own."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("no mount namespaces here (unshare or tmpfs refused)")
    done = subprocess.run(
        [*alone, sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [("no room" in line, "Read-only" in line) for line in lines] == [(True, False)] * 2 + [
        (False, True)
    ]
    assert all("untouched" in line for line in lines[:2])


def test_what_a_failed_save_wrote_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)
    real, left = os.link, [1]

    def second_fails(source: object, target: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "link", second_fails)
    with pytest.raises(RunError, match="no room"):
        put(tmp_path, 2)
    assert len(list(tmp_path.glob("step-*"))) == 1
    assert check(tmp_path, 1) == ()


CONFIG = {"run": {"seed": 1, "name": "a"}, "train": {"lr": 1e-4, "betas": [0.9, 0.99]}, "iterations": 10}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"lr": 2e-4, "betas": [0.9, 0.99]}}, r"train\.lr was 0\.0001, is 0\.0002"),
        (
            {"train": {"lr": 1e-4, "betas": [0.9, 0.98]}},
            r"train\.betas was \[0\.9, 0\.99\], is \[0\.9, 0\.98\]",
        ),
        ({"train": {"betas": [0.9, 0.99]}}, r"train\.lr was 0\.0001, is absent"),
        ({"new": None}, r"new was absent, is null"),
        ({"run": {"seed": True, "name": "a"}}, r"run\.seed was 1, is true"),
        ({"run": None}, r"run was .*, is null"),
        ({"run": {"seed": 2, "name": "b"}}, r"run\.name was .*; run\.seed was 1, is 2"),
    ],
)
def test_a_changed_config_is_refused_by_key(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        require_same_config(CONFIG, CONFIG | change, ["iterations"])
    assert caught.value.exit_code == 2
    assert "iterations" in str(caught.value.hint)


def test_keys_that_may_change() -> None:
    require_same_config(CONFIG, CONFIG, [])
    require_same_config(CONFIG, CONFIG | {"iterations": 99, "run": {}}, ["iterations", "run"])
    require_same_config({"betas": (0.9, 1)}, {"betas": [0.9, 1]}, [])
    with pytest.raises(ConfigError, match="iterations_max"):
        require_same_config({"iterations_max": 1}, {"iterations_max": 2}, ["iterations"])
    with pytest.raises(ConfigError, match="and 3 more"):
        require_same_config({str(i): 0 for i in range(8)}, {str(i): 1 for i in range(8)})
