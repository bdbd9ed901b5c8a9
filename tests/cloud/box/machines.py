"""Makes the instances of moto's EC2 real: each is a network, mount, pid, uts and ipc namespace with an sshd.

    python machines.py BOX SOURCE=TARGET...      in namespaces of its own; all machines end with it

Every running instance gets its private address, its user and key from the cloud-init data that SkyPilot wrote, and a
metadata service. A file `interrupt/<instance>` with seconds in it interrupts an instance as EC2 does: notice, then the
machine is gone and EC2 says `Server.SpotInstanceTermination` and when. The machines see SOURCE at TARGET, read-only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import market
import world
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason
from moto.server import ThreadedMotoServer

GATEWAY, PORT = "10.77.0.1", 5555
METADATA = Path(__file__).parents[2] / "fakes" / "metadata_server.py"
SSHD = "exec chroot {root} /usr/sbin/sshd -D -e -o UsePAM=no -o PasswordAuthentication=no -o 'AcceptEnv none'"
PROFILE = f"""\
export AWS_ENDPOINT_URL=http://{GATEWAY}:{PORT} AWS_DEFAULT_REGION=us-east-1 AWS_REGION=us-east-1
export SKYPILOT_DISABLE_USAGE_COLLECTION=1
"""


def run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass
class Machine:
    """One instance that has a body."""

    instance: str
    region: str
    address: str
    folder: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def network(self) -> str:
        return f"box-{self.instance[-8:]}"

    @property
    def root(self) -> Path:
        return self.folder / "root"


class Host:
    """Keeps bodies and EC2's list equal."""

    def __init__(self, box: Path, shown: dict[Path, Path]) -> None:
        self.box, self.shown = box, shown
        self.machines: dict[str, Machine] = {}
        self.clients = {
            region: boto3.client("ec2", region_name=region, endpoint_url=f"http://127.0.0.1:{PORT}")
            for region in world.REGIONS
        }
        self.due: dict[str, float] = {}

    def step(self) -> None:
        self.interrupt()
        alive: set[str] = set()
        for region, ec2 in self.clients.items():
            for group in ec2.describe_instances()["Reservations"]:
                for found in group["Instances"]:
                    if found["State"]["Name"] in ("pending", "running"):
                        alive.add(found["InstanceId"])
                        if found["InstanceId"] not in self.machines:
                            self.boot(region, found)
        for instance in set(self.machines) - alive:
            self.end(instance)

    def interrupt(self) -> None:
        for path in (self.box / "interrupt").iterdir():
            notice_s = float(path.read_text() or 0)
            path.unlink()
            if machine := self.machines.get(path.name):
                self.due[path.name] = time.monotonic() + notice_s
                at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + notice_s))
                notice = {"action": {"action": "terminate", "time": at}} if notice_s else {}
                (machine.folder / "metadata.json").write_text(json.dumps(notice))
        for instance in [i for i, at in self.due.items() if at <= time.monotonic()]:
            del self.due[instance]
            self.take(instance)

    def take(self, instance: str) -> None:
        """What EC2 does to an interrupted instance, and what it says of it afterwards."""
        machine = self.machines.get(instance)
        if machine is None:
            return
        self.end(instance)
        found = ec2_backends[DEFAULT_ACCOUNT_ID][machine.region].get_instance(instance)
        found.terminate()
        found._reason = time.strftime("Service initiated (%Y-%m-%d %H:%M:%S GMT)", time.gmtime())
        found.state_reason = StateReason("Server.SpotInstanceTermination", "Server.SpotInstanceTermination")

    def boot(self, region: str, found: dict) -> None:
        instance, address = found["InstanceId"], found["PrivateIpAddress"]
        machine = Machine(instance, region, address, self.box / "machines" / instance)
        user, key = self.login(region, instance)
        for name in ("upper", "work", "root"):
            (machine.folder / name).mkdir(parents=True)
        self.connect(machine)
        self.disk(machine, user, key)
        self.machines[instance] = machine
        self.start(machine)
        print("up", instance, address, flush=True)

    def login(self, region: str, instance: str) -> tuple[str, str]:
        answer = self.clients[region].describe_instance_attribute(InstanceId=instance, Attribute="userData")
        data = answer["UserData"].get("Value", "")
        for _ in range(2):  # moto stores it encoded once more
            if "#cloud-config" not in data:
                with contextlib.suppress(ValueError):
                    data = base64.b64decode(data).decode()
        user = re.search(r"-\s*name:\s*(\S+)", data)
        key = re.search(r"ssh_authorized_keys:\s*\n\s*-\s*\|-\s*\n\s*(\S.*)", data)
        if not user or not key:
            raise RuntimeError(f"no user or key in the user data of {instance}")
        return user[1], key[1].strip()

    def connect(self, machine: Machine) -> None:
        network, port = machine.network, f"v{machine.instance[-8:]}"
        run("ip", "netns", "add", network)
        (machine.folder / "network").write_text(f"net:[{os.stat(f'/run/netns/{network}').st_ino}]")
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", network)
        run("ip", "link", "set", port, "master", "br0", "up")
        run("ip", "-n", network, "link", "set", "lo", "up")
        run("ip", "-n", network, "link", "set", "eth0", "up")
        run("ip", "-n", network, "addr", "add", f"{machine.address}/16", "dev", "eth0")
        run("ip", "-n", network, "addr", "add", "169.254.169.254/32", "dev", "lo")

    def disk(self, machine: Machine, user: str, key: str) -> None:
        folder, root = machine.folder, machine.root
        layers = f"lowerdir={self.box / 'image'}:/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root / "root"))
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(root / "tmp"))
        for source, place in self.shown.items():
            target = root / place.relative_to("/")
            target.mkdir(parents=True, exist_ok=True)
            run("mount", "--bind", str(source), str(target))
            run("mount", "-o", "remount,bind,ro", str(target))
        ssh = root / "home" / user / ".ssh"
        ssh.mkdir(exist_ok=True, mode=0o700)
        (ssh / "authorized_keys").write_text(f"{key}\n")
        # A head launches machines itself: what SkyPilot would fetch for that from the internet.
        sky = root / "home" / user / ".sky"
        for name in ("catalogs", "wheels"):
            shutil.copytree(self.box / "home" / ".sky" / name, sky / name)
        for folder in (".ssh", ".sky"):
            run("chroot", str(root), "chown", "-R", f"{user}:{user}", f"/home/{user}/{folder}")
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{machine.address} {self.hostname(machine)}\n")
        (root / "etc/profile.d/box.sh").write_text(PROFILE)
        bashrc = root / "home" / user / ".bashrc"
        bashrc.write_text(PROFILE + bashrc.read_text())
        (root / "run/sshd").mkdir(parents=True, exist_ok=True)

    def start(self, machine: Machine) -> None:
        root = machine.root
        steps = [
            "mount --make-rprivate /",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o size=2g,mode=1777 tmpfs {root}/dev/shm",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /sys {root}/sys",
            f"hostname {self.hostname(machine)}",
            SSHD.format(root=root),
        ]
        state = machine.folder / "metadata.json"
        state.write_text("{}")
        inside = ["nsenter", f"--net=/run/netns/{machine.network}"]
        spaces = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        self.spawn(machine, "sshd", [*inside, *spaces, "sh", "-ec", "\n".join(steps)])
        metadata = [sys.executable, str(METADATA), "--address", "169.254.169.254", "--port", "80"]
        self.spawn(machine, "metadata", [*inside, *metadata, "--state", str(state)])

    def spawn(self, machine: Machine, name: str, command: list[str]) -> None:
        with (machine.folder / f"{name}.log").open("w") as log:
            environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
            machine.processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                    start_new_session=True,
                )
            )  # fmt: skip

    def hostname(self, machine: Machine) -> str:
        return f"ip-{machine.address.replace('.', '-')}"

    def end(self, instance: str) -> None:
        """A power cut: all processes at once, then what they stood on."""
        machine = self.machines.pop(instance)
        for process in machine.processes:
            process.kill()
            process.wait()
        run("ip", "netns", "del", machine.network, check=False)
        run("umount", "--recursive", "--lazy", str(machine.root))
        for name in ("upper", "work"):
            run("rm", "-rf", str(machine.folder / name), check=False)
        print("gone", instance, flush=True)


def main() -> None:
    box = Path(sys.argv[1])
    shown = {
        Path(source): Path(target) for source, _, target in (item.partition("=") for item in sys.argv[2:])
    }
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "box",
        "AWS_SECRET_ACCESS_KEY": "box",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.pop("AWS_CA_BUNDLE", None)
    server = ThreadedMotoServer(ip_address="0.0.0.0", port=PORT)
    server.start()
    market.open_market(box / "refused.json")
    world.build(f"http://127.0.0.1:{PORT}", box / "home")
    Path("/run/netns").mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")  # names of networks are this box's own
    host = Host(box, shown)
    (box / "ready").touch()
    while True:
        host.step()
        time.sleep(0.5)


if __name__ == "__main__":
    main()
