import json
import multiprocessing as mp
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spotlight.errors import IntegrityError, NotFoundError, PreconditionError
from spotlight.store import arena


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 5, generator=g),
        "a.weight": torch.randn(7, 2, generator=g).to(torch.bfloat16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.randn(4, 6, generator=g).t(),
        "f8": torch.randn(9, generator=g).to(torch.float8_e4m3fn),
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tolist() == b[k].tolist() for k in a
    )


def test_what_was_put_in_comes_out(tmp_path, tensors):
    arena.create(tmp_path / "w", tensors)
    found = arena.attach(tmp_path / "w")
    assert same(found, tensors)
    assert all(t.data_ptr() % 64 == 0 for t in found.values() if t.numel())
    arena.verify(tmp_path / "w")


def test_from_safetensors_files_without_the_digest(tmp_path, tensors):
    names = sorted(tensors)
    whole = {n: tensors[n].contiguous() for n in names}
    save_file({n: whole[n] for n in names[:3]}, tmp_path / "1.safetensors")
    save_file({n: whole[n] for n in names[3:]}, tmp_path / "2.safetensors")
    arena.create_from_files(tmp_path / "w", [tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    assert same(arena.attach(tmp_path / "w"), tensors)
    with pytest.raises(IntegrityError, match=r"1\.safetensors and in 1\.safetensors"):
        arena.create_from_files(tmp_path / "x", [tmp_path / "1.safetensors"] * 2)


def test_a_write_stays_with_the_writer(tmp_path, tensors):
    arena.create(tmp_path / "w", tensors)
    mine, yours = arena.attach(tmp_path / "w"), arena.attach(tmp_path / "w")
    mine["b.weight"].zero_()
    assert torch.equal(yours["b.weight"], tensors["b.weight"])
    arena.verify(tmp_path / "w")


def test_assign_takes_the_mapping_itself(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    arena.create(tmp_path / "w", model.state_dict())
    tensors = arena.attach(tmp_path / "w")
    with torch.device("meta"):
        skeleton = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    arena.assign(skeleton, tensors)
    assert skeleton[0].weight.data_ptr() == tensors["0.weight"].data_ptr()
    x = torch.randn(8, 4)
    assert torch.equal(skeleton.eval()(x), model.eval()(x))


def test_assign_refuses_what_does_not_fit(tmp_path):
    tensors = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    with pytest.raises(IntegrityError, match="weight"):
        arena.assign(torch.nn.Linear(4, 2), tensors)
    with pytest.raises(IntegrityError, match="missing"):
        arena.assign(torch.nn.Linear(3, 2), {"weight": tensors["weight"]})


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body.update(size_bytes=1 << 40),
        lambda body: body["tensors"]["a.weight"].update(offset=64),
        lambda body: body["tensors"]["a.weight"].update(shape=[7, -2]),
        lambda body: body["tensors"]["a.weight"].update(dtype="object"),
        lambda body: body["tensors"].clear(),
        lambda body: body.update(format=2),
        lambda body: body.pop("tensors"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, tensors, damage):
    arena.create(tmp_path / "w", tensors)
    path = tmp_path / "w" / "manifest.json"
    body = json.loads(path.read_bytes())
    damage(body)
    path.write_text(json.dumps(body))
    with pytest.raises(IntegrityError):
        arena.attach(tmp_path / "w")


def test_truncated_missing_and_changed_files(tmp_path, tensors):
    with pytest.raises(NotFoundError):
        arena.attach(tmp_path / "nowhere")
    arena.create(tmp_path / "w", tensors)
    path = tmp_path / "w" / "weights.bin"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="digest"):
        arena.verify(tmp_path / "w")
    path.write_bytes(data[:-64])
    with pytest.raises(IntegrityError, match="bytes"):
        arena.attach(tmp_path / "w")
    path.unlink()
    with pytest.raises(IntegrityError):
        arena.attach(tmp_path / "w")
    (tmp_path / "w" / "manifest.json").write_bytes(b"\xff{")
    with pytest.raises(IntegrityError):
        arena.attach(tmp_path / "w")


def test_an_arena_is_not_overwritten_and_leaves_nothing_behind(tmp_path, tensors):
    arena.create(tmp_path / "w", tensors)
    with pytest.raises(IntegrityError, match="exists"):
        arena.create(tmp_path / "w", {"other": torch.ones(1)})
    assert same(arena.attach(tmp_path / "w"), tensors)
    assert os.listdir(tmp_path) == ["w"]


def test_more_than_the_memory_there_is(tmp_path):
    with pytest.raises(PreconditionError, match="no room"):
        arena._reserve(tmp_path / "big", 1 << 52)


def test_no_tensors_and_unknown_dtypes(tmp_path):
    with pytest.raises(IntegrityError, match="at least one"):
        arena.create(tmp_path / "w", {})
    with pytest.raises(IntegrityError, match="complex64"):
        arena.create(tmp_path / "w", {"c": torch.zeros(1, dtype=torch.complex64)})
    assert os.listdir(tmp_path) == []


def test_damaged_and_missing_sources(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(IntegrityError):
        arena.create_from_files(tmp_path / "w", [tmp_path / "bad.safetensors"])
    with pytest.raises(NotFoundError):
        arena.create_from_files(tmp_path / "w", [tmp_path / "none.safetensors"])
    assert not (tmp_path / "w").exists()


def _fill_once(root, log):
    def fill():
        with open(log, "a") as file:
            file.write("fill\n")
        return [root / "src.safetensors"]

    assert arena.attach_or_create(root / "w", fill)["x"].sum() == 1000


def test_one_process_fills_and_the_others_attach(tmp_path):
    save_file({"x": torch.ones(1000)}, tmp_path / "src.safetensors")
    (tmp_path / "w.part-99999").mkdir()  # left by a process that was killed while it filled
    context = mp.get_context("fork")
    others = [context.Process(target=_fill_once, args=(tmp_path, tmp_path / "log")) for _ in range(4)]
    for process in others:
        process.start()
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0] * 4
    assert (tmp_path / "log").read_text() == "fill\n"
    assert not (tmp_path / "w.part-99999").exists()
    arena.remove(tmp_path / "w")
    assert sorted(os.listdir(tmp_path)) == ["log", "src.safetensors"]


CHILD = """
import sys, torch
from pathlib import Path
from spotlight.store import arena
def memory():
    rows = (line.split() for line in open("/proc/self/smaps_rollup") if "kB" in line)
    return {row[0][:-1]: int(row[1]) for row in rows}
tensors = arena.attach(Path(sys.argv[1]))
before = memory()
total = sum(float(t.view(-1)[::1024].sum()) for t in tensors.values())
print("touched", flush=True)
sys.stdin.readline()
after = memory()
print(*(after[key] - before[key] for key in ("Rss", "Anonymous", "Pss")), flush=True)
sys.stdin.readline()
"""


def test_two_processes_hold_the_weights_once(tmp_path):
    """Proportional memory: each of two processes that touched every page is charged with half of them."""
    size_kib = 64 << 10
    arena.create(tmp_path / "w", {f"t{i}": torch.ones(1 << 20) for i in range(16)})
    command = [sys.executable, "-c", CHILD, str(tmp_path / "w")]
    pipe, root = subprocess.PIPE, Path(__file__).parents[3]
    two = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) for _ in range(2)]
    for process in two:
        assert process.stdout.readline() == "touched\n"
    for process in two:
        process.stdin.write("\n")
        process.stdin.flush()
        resident, copied, proportional = map(int, process.stdout.readline().split())
        assert resident > 0.9 * size_kib
        assert copied < 0.05 * size_kib
        assert proportional < 0.6 * size_kib
    for process in two:
        process.communicate("\n")
