"""The cloud in a box: real SkyPilot on moto's EC2, whose machines are namespaces of this one. Needs root.

    sudo make cloud            a shell on the "laptop" of the box: `sky`, `spotlight launch`, `aws` work there
    python box.py              the same

Nothing in it can reach the internet, nor the internet it. All of it lives in namespaces that end with the process that
made it: even a `kill -9` of the tests leaves no process, no network and no mount but the box's own folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

HERE = Path(__file__).parent
REPO = HERE.parents[2]
NEEDED = ("ip", "nsenter", "unshare", "sshd", "ssh", "rsync", "sudo", "ssh-keygen")
BUCKET = "spotlight-box"
ENDPOINT = "http://10.77.0.1:5555"
START_S = 600.0
LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def missing() -> str:
    """Why there can be no box here; empty: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux (namespaces, mounts)"
    lost = [name for name in NEEDED if shutil.which(name) is None]
    if lost:
        return f"not installed: {', '.join(lost)} (make cloud-packages)"
    fits = ["/usr/bin/python3", "-c", "import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))"]
    if not Path(fits[0]).exists() or subprocess.run(fits, check=False).returncode:
        return "/usr/bin/python3 is not Python 3.8 to 3.11, which SkyPilot's own Ray on a machine needs"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if done.returncode == 0 else "may not make namespaces"


class Box:
    """One box at a time on a host. `folder` is mounted over with a tmpfs and unmounted again at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self._processes: list[subprocess.Popen] = []
        self._laptop = 0  # a process that holds the laptop's namespaces
        self._networks: set[str] = set()
        self._claim = socket.socket(socket.AF_UNIX)
        self._mounted = False

    def start(self, phase: Callable[[str], None] = lambda _: None) -> None:
        """Build and boot all of it; `phase` hears what is done. Raises RuntimeError where there is a box already."""
        try:
            self._claim.bind(f"\0{self.folder}")  # gone with this process, however it ends
        except OSError:
            raise RuntimeError(f"another box is running at {self.folder}") from None
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(self.folder):
            _run("mount", "-t", "tmpfs", "-o", "size=8g,mode=755", "tmpfs", str(self.folder))
            self._mounted = True
        for name in ("home", "machines", "logs", "interrupt", "tmp", "tmp.work"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        for name in ("ready", "laptop"):
            (self.folder / name).unlink(missing_ok=True)
        self._image()
        phase("machine image")
        self._wheels()
        phase("wheels")
        self._boot_laptop()
        # The machines' network, mounts and processes are namespaces within this one's and end with it.
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        shown = [f"{source}={target}" for source, target in self._shown().items()]
        machines = [sys.executable, str(HERE / "machines.py"), str(self.folder), *shown]
        self._start("machines", [*self._enter("net"), *inside, *machines], (self.folder / "ready").exists)
        phase("EC2")
        # Others on this host may clear /dev/shm, and with it the server's semaphores.
        server = f"mount -t tmpfs tmpfs /dev/shm; exec {sys.executable} -m sky.server.server --host=127.0.0.1"
        sky = self.command([*inside, "sh", "-ec", f"{server} --port=46580"])
        self._start("sky", sky, self._server_answers)
        phase("SkyPilot's server")

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
        """A command line on the laptop: its network, its /tmp."""
        return [*self._enter("net", "mnt"), "env", f"--chdir={self.home}", *command]

    def spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        """Start a process on the laptop; it ends with the box. Output goes to `logs/<name>.log`."""
        return self._spawn(name, self.command(command))

    def interrupt(self, instance: str, notice_s: float = 0.0) -> None:
        """Take a spot machine as EC2 does."""
        draft = self.folder / f"interrupt.{instance}"
        draft.write_text(str(notice_s))
        draft.replace(self.folder / "interrupt" / instance)

    @contextlib.contextmanager
    def refusing(self, codes: Mapping[str, str]) -> Iterator[None]:
        """While this lasts EC2 has no machine in these zones, and says so with this error code."""
        refused = self.folder / "refused.json"
        refused.write_text(json.dumps(codes))
        try:
            yield
        finally:
            refused.unlink()

    def homes(self) -> list[Path]:
        """Homes on machines that have been sent Spotlight's files."""
        return [path.parent for path in self.folder.glob("machines/*/upper/home/*/.spotlight")]

    def stop(self) -> None:
        """End what is in the box, then the box. Safe in any state."""
        if self._processes or self._mounted:  # else nothing of ours is there, but another's box may be
            self._end()
        self._claim.close()

    def leftovers(self) -> list[str]:
        """What is there still of machines: processes, and mounts of the host that plays them."""
        found = []
        for path in self.folder.glob("machines/*/network"):
            found += [f"process {pid} of {path.parent.name}" for pid in _inside(path.read_text())]
        (host,) = (p.pid for p in self._processes if str(HERE / "machines.py") in p.args)
        (child,) = psutil.Process(host).children()
        mounts = [line.split()[1] for line in Path(f"/proc/{child.pid}/mounts").read_text().splitlines()]
        return found + [mount for mount in mounts if mount.startswith(str(self.folder / "machines"))]

    def traces(self) -> list[str]:
        """What is on the host of a box that has ended: nothing."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        left = [mount for mount in mounts if mount.startswith(str(self.folder))] if self._mounted else []
        return left + [f"process {pid}" for network in self._networks for pid in _inside(network)]

    def pulse(self) -> int:
        """A number that changes as long as somebody in the box gets on with something."""
        logs = [*self.folder.glob("machines/*/upper/home/*/sky_logs/**/*.log")]
        logs += self.folder.glob("machines/*/upper/home/*/.spotlight/runs/*/*.jsonl")
        logs += self.home.glob("sky_logs/**/*.log")
        return sum(path.stat().st_size for path in logs if path.is_file())

    def post_mortem(self, lines: int = 40) -> str:
        """The ends of the logs that say why something did not happen."""
        logs = [*self.folder.glob("logs/sky.log"), *self.home.glob("sky_logs/*/provision.log")]
        for pattern in (
            "sky_logs/*/run.log",
            ".spotlight/runs/*/logs/worker-*.err",
            ".sky/api_server/server.log",
        ):
            logs += self.folder.glob(f"machines/*/upper/home/*/{pattern}")
        tails = (
            f"--- {path.relative_to(self.folder)}\n" + "\n".join(_text(path).splitlines()[-lines:])
            for path in logs
        )
        return "\n".join(tails)

    # ------------------------------------------------------------------------------------ parts

    def _end(self) -> None:
        self._networks |= {path.read_text() for path in self.folder.glob("machines/*/network")}
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
        while strays := [pid for network in self._networks for pid in _inside(network)]:
            for pid in strays:
                _kill(pid)
            time.sleep(0.05)
        if self._mounted and os.path.ismount(self.folder):
            _run("umount", "-l", str(self.folder))
            self.folder.rmdir()

    def _boot_laptop(self) -> None:
        """A network of its own, and a /tmp whose changes stay in the box."""
        layers = f"lowerdir=/tmp,upperdir={self.folder / 'tmp'},workdir={self.folder / 'tmp.work'}"
        steps = [
            f"mount -t overlay overlay -o {layers} /tmp",
            "ip link set lo up",
            "ip link add br0 type bridge",
            "ip addr add 10.77.0.1/16 dev br0",
            "ip link set br0 up",
            f"touch {self.folder / 'laptop'}",
            "exec sleep infinity",
        ]
        command = ["unshare", "--net", "--mount", "sh", "-ec", "\n".join(steps)]
        self._start("laptop", command, (self.folder / "laptop").exists)
        self._laptop = self._processes[-1].pid
        self._networks.add(os.readlink(f"/proc/{self._laptop}/ns/net"))

    def _enter(self, *spaces: str) -> list[str]:
        return ["nsenter", *(f"--{'mount' if s == 'mnt' else s}=/proc/{self._laptop}/ns/{s}" for s in spaces)]

    def _start(self, name: str, command: Sequence[str], ready: Callable[[], bool]) -> None:
        process, deadline = self._spawn(name, command), time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name}: {_text(self.folder / 'logs' / f'{name}.log')[-3000:]}")
            time.sleep(0.2)

    def _spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment(), cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _image(self) -> None:
        ready = self.folder / "image.ready"
        if not ready.exists():
            shutil.rmtree(self.folder / "image", ignore_errors=True)
            uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            _run("unshare", "--mount", str(HERE / "image.sh"), str(self.folder / "image"), str(uv))
            ready.touch()
        # Spotlight is "on the image": the environment of this process, at the place where a real image has it.
        target = self.folder / "image" / "opt" / "spotlight"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(Path(sys.executable).parents[1])

    def _wheels(self) -> None:
        """SkyPilot builds a wheel of itself for its nodes, and so do we. Both need the internet, so: before."""
        kept = self.folder / "wheel"
        environment = {**os.environ, "HOME": str(kept), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        environment["TMPDIR"] = str(self.folder / "tmp")
        if not (kept / ".sky" / "wheels").is_dir():
            kept.mkdir(exist_ok=True)
            build = "from sky.backends import wheel_utils; wheel_utils.build_sky_wheel()"
            _run(sys.executable, "-c", build, environment=environment)
        shutil.copytree(kept / ".sky" / "wheels", self.home / ".sky" / "wheels")
        for old in kept.glob("*.whl"):
            old.unlink()
        wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(kept), str(REPO))
        _run(sys.executable, *wheel, environment={**environment, "HOME": os.environ.get("HOME", "/root")})

    def _shown(self) -> dict[Path, Path]:
        """What the machines see of this host beyond `/`, and where: the interpreter, the environment, our code.

        The code is a copy: an environment that is installed editable would run whatever is being edited meanwhile.
        """
        code = self.folder / "code"
        shutil.rmtree(code, ignore_errors=True)
        parts = ("spotlight", "cli", "sky")
        for name in parts:
            shutil.copytree(REPO / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
        # A machine's own /root and /tmp lie over this host's.
        hidden = [path.resolve() for path in (Path(sys.base_prefix), Path(sys.prefix))]
        shown = {path: path for path in hidden if path.parts[1] in ("root", "tmp")}
        return shown | {code / name: REPO / name for name in parts}

    def _server_answers(self) -> bool:
        probe = self.command(["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/46580"])
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _die_with_parent() -> None:
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _inside(network: str) -> list[int]:
    """Processes whose network namespace is `network` ("net:[number]")."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.readlink(path) == network:
                found.append(int(path.parts[2]))
        except OSError:  # it ended meanwhile
            continue
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return str(error)


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
        box.start(lambda what: print(f"{what}: ready", file=sys.stderr))
        return subprocess.run(
            box.command(sys.argv[1:] or ["bash"]), env=box.environment(), cwd=box.home, check=False
        ).returncode
    finally:
        box.stop()


if __name__ == "__main__":
    sys.exit(main())
