"""`api.export`: from a run's checkpoint to what diffusers loads, and to the hub's door."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from fakes.rl_runs import roll_out

from spotlight import api, config
from spotlight.errors import CredentialError, IntegrityError, NotFoundError, PreconditionError, UserError
from spotlight.names import run_dir
from spotlight.rl import batching, params
from spotlight.rl.export import LORA_FILE, load_export
from spotlight.rl.models import load_model
from spotlight.rl.train_step import Trainer
from spotlight.store import checkpoint


@pytest.fixture(scope="module", params=["lora", "full"])
def trained(request: pytest.FixtureRequest) -> Trainer:
    settings = [f"train.mode={request.param}", "train.lora_rank=4", "train.lr=3e-3", "train.ema=0.5"]
    chosen = config.load("tiny", settings)
    trainer = Trainer(load_model(chosen.model), chosen)
    for iteration in range(2):
        trainer.train(roll_out(trainer, iteration, groups=2), iteration)
    return trainer


@pytest.fixture
def run(trained: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with checkpoints of iterations 1 and 2; only 2 is of the trained state."""
    monkeypatch.setenv("SPOTLIGHT_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder = run_dir("run")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.dump(trained.config))
    tensors, meta = trained.state()
    for step, state in ((1, {name: t * 0.9 for name, t in tensors.items()}), (2, tensors)):
        checkpoint.save(folder / "checkpoints", step, {"trainer": state}, {"trainer": meta})
    return "run"


def answers(adapter: Any) -> torch.Tensor:
    latents = torch.randn(4, 1, 16, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return batching.velocity(adapter, latents, torch.full((4,), 0.4), batching.encode(adapter, ["7"] * 4))


def wanted(trainer: Trainer, weights: Any) -> torch.Tensor:
    with params.bound(trainer.adapter.transformer, weights):
        return answers(trainer.adapter)


@pytest.mark.parametrize("live", [False, True])
def test_it_does_what_was_trained(run: str, trained: Trainer, live: bool, tmp_path: Path) -> None:
    found = api.export(run, out=tmp_path / "out", live=live)
    full = trained.config.train.mode == "full"
    path = tmp_path / "out" / ("transformer" if full else LORA_FILE)
    assert found == {"path": str(path), "run": run, "iteration": 2, "pushed_to": None}
    fresh = load_model(trained.config.model)
    base = answers(fresh)
    load_export(fresh, tmp_path / "out")
    chosen, other = trained.parameters, trained.average
    if not live:
        chosen, other = other, chosen
    torch.testing.assert_close(answers(fresh), wanted(trained, chosen), atol=0 if full else 1e-5, rtol=0)
    assert (answers(fresh) - wanted(trained, other)).abs().max() > 1e-4
    assert (answers(fresh) - base).abs().max() > 1e-3


def test_merged_it_is_the_real_class(run: str, trained: Trainer, tmp_path: Path) -> None:
    found = api.export(run, out=tmp_path / "out", merged=True)
    adapter = load_model(trained.config.model)
    adapter.transformer = SD3Transformer2DModel.from_pretrained(found["path"]).eval()
    torch.testing.assert_close(answers(adapter), wanted(trained, trained.average), atol=1e-5, rtol=0)


def test_an_older_checkpoint_is_had_by_number_alone(run: str, trained: Trainer, tmp_path: Path) -> None:
    api.export(run, out=tmp_path / "new")
    assert api.export(run, out=tmp_path / "old", checkpoint=1)["iteration"] == 1
    adapters = [load_model(trained.config.model) for _ in range(2)]
    for adapter, name in zip(adapters, ("new", "old"), strict=True):
        load_export(adapter, tmp_path / name)
    assert not torch.equal(answers(adapters[0]), answers(adapters[1]))
    with pytest.raises(NotFoundError, match="iteration 7") as caught:
        api.export(run, out=tmp_path / "none", checkpoint=7)
    assert "1, 2" in str(caught.value.hint)


def test_a_damaged_checkpoint_is_no_other(run: str, tmp_path: Path) -> None:
    (file,) = (run_dir(run) / "checkpoints").glob("step-00000002-*/trainer.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="digest"):
        api.export(run, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert api.export(run, out=tmp_path / "out", checkpoint=1)["iteration"] == 1


def test_what_cannot_be_is_refused(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        api.export(run, out=full)
    assert [path.name for path in full.iterdir()] == ["mine"]
    with pytest.raises(UserError, match="not empty"):
        api.export(run, out=full / "mine")
    with pytest.raises(NotFoundError, match="no run"):
        api.export("other", out=tmp_path / "out")
    with pytest.raises(CredentialError, match="token"):
        api.export(run, out=tmp_path / "out", push="me/mine")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(UserError, match="hub id"):
        api.export(run, out=tmp_path / "out", push="../mine")
    monkeypatch.setenv("SPOTLIGHT_HOME", str(tmp_path / "second"))
    run_dir("run").mkdir(parents=True)
    (run_dir("run") / "config.yaml").write_text(config.dump(config.load("tiny")))
    with pytest.raises(NotFoundError, match="no checkpoint yet"):
        api.export("run", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of a few files needs."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.path, self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        host = f"http://127.0.0.1:{self.server.server_port}"
        if self.server.refusing:  # type: ignore[attr-defined]
            return self._say(401, {"error": "Invalid token"})
        if self.path == "/api/repos/create":
            return self._say(200, {"url": f"{host}/me/mine", "name": "me/mine"})
        if self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "lfs"} for one in json.loads(body)["files"]]
            for one in files:
                one["shouldIgnore"] = False
            return self._say(200, {"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            actions = {"upload": {"href": f"{host}/put", "header": {}}}
            return self._say(
                200, {"transfer": "basic", "objects": [{**one, "actions": actions} for one in asked]}
            )
        if "/commit/" in self.path:
            return self._say(
                200, {"commitUrl": f"{host}/me/mine/commit/1", "commitOid": "1", "hookOutput": ""}
            )
        return self._say(404, {"error": self.path})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.path, self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        self._say(200, {})

    def do_GET(self) -> None:
        self._say(200, {"id": "me/mine", "sha": "0", "siblings": [], "private": True, "tags": []})

    def _say(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.heard, server.refusing = [], False  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()


def test_it_is_pushed_with_the_token_of_the_environment(
    run: str, trained: Trainer, hub: Any, tmp_path: Path
) -> None:
    found = api.export(run, out=tmp_path / "out", push="me/mine")
    assert found["pushed_to"].endswith("/me/mine/commit/1")
    created = json.loads(next(body for path, _, body in hub.heard if path == "/api/repos/create"))
    assert created["visibility"] == "private"
    files = {path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files <= {body for path, _, body in hub.heard if path == "/put"}
    assert {token for path, token, _ in hub.heard if path.startswith("/api")} == {"Bearer hf_secret"}


def test_a_hub_that_refuses_or_is_not_there(
    run: str, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refusing = True
    with pytest.raises(CredentialError, match="refuses the token") as caught:
        api.export(run, out=tmp_path / "out", push="me/mine")
    assert "hf_secret" not in str(caught.value)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PreconditionError, match="cannot be reached"):
        api.export(run, out=tmp_path / "again", push="me/mine")
