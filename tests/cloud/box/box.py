"""The cloud in a box: real SkyPilot on moto's EC2, whose machines are namespaces of this one. Needs root.

    sudo make cloud            a shell on the "laptop" of the box: `sky`, `spotlight launch`, `aws` work there
    python box.py              the same

Nothing in it can reach the internet, nor the internet it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
REPO = HERE.parents[2]
NETWORK = "spotlight-box"
NEEDED = ("ip", "nsenter", "unshare", "sshd", "ssh", "rsync", "sudo", "ssh-keygen")
BUCKET = "spotlight-box"
ENDPOINT = "http://10.77.0.1:5555"


def missing() -> str:
    """Why there can be no box here; empty: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux (namespaces, mounts)"
    lost = [name for name in NEEDED if shutil.which(name) is None]
    if lost:
        return f"not installed: {', '.join(lost)} (apt install openssh-server rsync sudo iproute2)"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "may not make namespaces"


class Box:
    """One box at a time on a host. `folder` is mounted over with a tmpfs and unmounted again at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self._processes: list[subprocess.Popen] = []
        self._mounted = False

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(self.folder):
            _run("mount", "-t", "tmpfs", "-o", "size=8g,mode=755", "tmpfs", str(self.folder))
            self._mounted = True
        for name in ("home", "machines", "logs", "interrupt"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        (self.folder / "ready").unlink(missing_ok=True)
        self._image()
        self._wheels()
        _run("ip", "netns", "add", NETWORK)
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "link", "add", "br0", "type", "bridge")
        self._inside("ip", "addr", "add", "10.77.0.1/16", "dev", "br0")
        self._inside("ip", "link", "set", "br0", "up")
        shown = [f"{source}={target}" for source, target in self._shown().items()]
        self.spawn("machines", [sys.executable, str(HERE / "machines.py"), str(self.folder), *shown])
        self._await("machines", (self.folder / "ready").exists)
        # Others on this host may clear /dev/shm, and with it the server's semaphores.
        server = f"exec {sys.executable} -m sky.server.server --host=127.0.0.1 --port=46580"
        script = f"mount -t tmpfs tmpfs /dev/shm; {server}"
        self.spawn("sky", ["unshare", "--mount", "sh", "-ec", script])
        self._await("sky", self._server_answers)

    def environment(self) -> dict[str, str]:
        """Of the laptop."""
        keep = {name: os.environ[name] for name in ("TERM", "LANG") if name in os.environ}
        return keep | {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "SPOTLIGHT_HOME": str(self.home / "spotlight"),
            "AWS_ENDPOINT_URL": ENDPOINT,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "box",
            "AWS_SECRET_ACCESS_KEY": "box",
            "AWS_EC2_METADATA_DISABLED": "true",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SPOTLIGHT_WHEEL": str(next((self.folder / "wheel").glob("*.whl"), "")),
            "SPOTLIGHT_STORE": f"s3://{BUCKET}/runs",
            "SKYPILOT_USER": "box",
            "SKYPILOT_USER_ID": "b0b0b0b0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line on the laptop."""
        return ["nsenter", f"--net=/run/netns/{NETWORK}", *command]

    def spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        """Start a process on the laptop; it ends with the box. Output goes to `logs/<name>.log`."""
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(command), env=self.environment(), cwd=self.home,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def interrupt(self, instance: str, notice_s: float = 0.0) -> None:
        """Take a spot machine as EC2 does."""
        draft = self.folder / f"interrupt.{instance}"
        draft.write_text(str(notice_s))
        draft.replace(self.folder / "interrupt" / instance)

    def stop(self) -> None:
        """End what is in the box, then the box. Safe in any state."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end_strays()
        _run("ip", "netns", "del", NETWORK, check=False)
        if self._mounted and os.path.ismount(self.folder):
            _run("umount", "-l", str(self.folder))

    def leftovers(self) -> list[str]:
        """Machines' namespaces, mounts and processes that should be gone."""
        spaces = (
            [path.name for path in Path("/run/netns").glob("box-*")] if Path("/run/netns").exists() else []
        )
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        machines = str(self.folder / "machines")
        return spaces + [mount for mount in mounts if mount.startswith(machines)]

    def _image(self) -> None:
        if not (self.folder / "image" / "home" / "ubuntu" / "sky-user-env").is_dir():
            uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            _run(str(HERE / "image.sh"), str(self.folder / "image"), str(uv))
        target = self.folder / "image" / "opt" / "spotlight"
        target.parent.mkdir(exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(Path(sys.executable).parents[1])

    def _wheels(self) -> None:
        """SkyPilot builds a wheel of itself for its nodes, and so do we. Both need the internet, so: before."""
        kept = self.folder / "wheel"
        if not (kept / ".sky" / "wheels").is_dir():
            kept.mkdir(exist_ok=True)
            build = "from sky.backends import wheel_utils; wheel_utils.build_sky_wheel()"
            environment = {**os.environ, "HOME": str(kept), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
            _run(sys.executable, "-c", build, environment=environment)
        shutil.copytree(kept / ".sky" / "wheels", self.home / ".sky" / "wheels")
        for old in kept.glob("*.whl"):
            old.unlink()
        _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(kept), str(REPO))

    def _shown(self) -> dict[Path, Path]:
        """What the machines see of this host beyond `/`, and where: the interpreter, the environment, our code.

        The code is a copy: an environment that is installed editable would run whatever is being edited meanwhile.
        """
        code = self.folder / "code"
        shutil.rmtree(code, ignore_errors=True)
        for name in ("spotlight", "cli", "sky"):
            shutil.copytree(REPO / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
        hidden = [
            path for path in (Path(sys.base_prefix), Path(sys.prefix)) if path.resolve().parts[1] == "root"
        ]
        return {path.resolve(): path.resolve() for path in hidden} | {code: REPO}

    def _inside(self, *command: str) -> None:
        _run(*self.command(command))

    def _await(self, name: str, ready: Callable[[], bool], timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "logs" / f"{name}.log").read_text()[-3000:])
            time.sleep(0.2)

    def _server_answers(self) -> bool:
        probe = self.command(["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/46580"])
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0

    def _end_strays(self) -> None:
        """SkyPilot's server leaves executors behind when it is ended: whatever has the box's home."""
        mark = f"HOME={self.home}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue


def _run(*command: str, check: bool = True, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def main() -> int:
    if why := missing():
        sys.stderr.write(f"no cloud in a box here: {why}\n")
        return 3
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidy up on both
    box = Box(Path(os.environ.get("SPOTLIGHT_BOX", "/run/spotlight-box")))
    try:
        box.start()
        return subprocess.run(
            box.command(sys.argv[1:] or ["bash"]), env=box.environment(), cwd=box.home, check=False
        ).returncode
    finally:
        box.stop()


if __name__ == "__main__":
    sys.exit(main())
