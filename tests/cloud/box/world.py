"""The account of the cloud in a box: moto's EC2, IAM and S3, and the small catalog that SkyPilot reads."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import boto3

REGIONS = {"us-east-1": 0, "us-west-2": 16}  # third byte of the region's network 10.77.x.0/20
DEARER = {"us-east-1": 1.0, "us-west-2": 1.1}
VPC, ROLE, BUCKET = "spotlight-box", "skypilot-v1", "spotlight-box"
ZONES_PER_REGION = 2
GPU_IMAGES = ("skypilot:custom-gpu-ubuntu", "skypilot:custom-gpu-ubuntu-cuda13", "skypilot:custom-cpu-ubuntu")
# instance type, GPU, GPUs, vCPUs, GiB, $/h on demand, $/h spot (us-east-1)
MACHINES = (
    ("p5.48xlarge", "H100", 8, 192, 2048, 55.04, 17.2),
    ("p5.4xlarge", "H100", 1, 16, 256, 6.88, 2.15),
    ("g3.8xlarge", "M60", 2, 32, 244, 2.28, 0.75),
    ("m6i.2xlarge", "", 0, 8, 32, 0.384, 0.15),
)
VMS = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,"
    "Price,SpotPrice,Region,AvailabilityZone,Arch"
)
IMAGES = "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId"
QUOTAS = "InstanceType,OnDemandInstanceCode,SpotInstanceCode"


def build(endpoint: str, home: Path) -> None:
    """Fill the account and write catalog, login and configuration below `home`."""
    catalog = home / ".sky" / "catalogs" / "v8"
    images, zones = [], {}
    for region, base in REGIONS.items():
        ec2 = boto3.client("ec2", region_name=region, endpoint_url=endpoint)
        zones[region] = _network(ec2, base)
        images += [[tag, region, "ubuntu", "22.04", _image(ec2), "20241104", ""] for tag in GPU_IMAGES]
    _role(boto3.client("iam", endpoint_url=endpoint))
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    _table(catalog / "aws" / "images.csv", IMAGES, images)
    _table(catalog / "aws" / "vms.csv", VMS, _machines(zones))
    _table(catalog / "aws" / "instance_quota_mapping.csv", QUOTAS, [])
    gpus = sorted({gpu for _, gpu, *_ in MACHINES if gpu})
    _table(catalog / "common" / "accelerators.csv", "AcceleratorName,Clouds", [[gpu, "AWS"] for gpu in gpus])
    _table(
        catalog / "common" / "metadata.csv", "GPU,MemoryGB,Manufacturer", [[g, 80, "nvidia"] for g in gpus]
    )
    (home / ".sky" / "config.yaml").write_text(
        f"aws:\n  vpc_names: {VPC}\n  use_internal_ips: true\n  use_ssm: false\nallowed_clouds: [aws]\n"
    )
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = box\naws_secret_access_key = box\n"
    )


def _network(ec2: Any, base: int) -> list[str]:
    """A VPC with one subnet per zone and no way out; the ids of the zones."""
    vpc = ec2.create_vpc(CidrBlock=f"10.77.{base}.0/20")["Vpc"]["VpcId"]
    ec2.create_tags(Resources=[vpc], Tags=[{"Key": "Name", "Value": VPC}])
    zones = ec2.describe_availability_zones()["AvailabilityZones"][:ZONES_PER_REGION]
    for i, zone in enumerate(zones):
        block = f"10.77.{base + i + 1}.0/24"
        ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=zone["ZoneName"])
    return [zone["ZoneId"] for zone in zones]


def _image(ec2: Any) -> str:
    return ec2.register_image(
        Name="node",
        Architecture="x86_64",
        RootDeviceName="/dev/sda1",
        VirtualizationType="hvm",
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8}}],
    )["ImageId"]


def _role(iam: Any) -> None:
    """What SkyPilot would make itself, with managed policies that moto does not know."""
    iam.create_instance_profile(InstanceProfileName=ROLE)
    iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument='{"Version":"2012-10-17","Statement":[]}')
    iam.add_role_to_instance_profile(InstanceProfileName=ROLE, RoleName=ROLE)


def _machines(zones: dict[str, list[str]]) -> list[list[Any]]:
    rows = []
    for kind, gpu, gpus, vcpus, memory, usd, spot in MACHINES:
        memory_info = {"MemoryInfo": {"SizeInMiB": 81920}}
        info = {"Gpus": [{"Name": gpu, "Manufacturer": "NVIDIA", "Count": gpus, **memory_info}]}
        for region, ids in zones.items():
            for i, zone in enumerate(ids):
                prices = [usd * DEARER[region], spot_usd(spot, region, i)]
                what = [
                    kind,
                    gpu,
                    float(gpus) if gpus else "",
                    float(vcpus),
                    float(memory),
                    info if gpus else "",
                ]
                rows.append([*what, *prices, region, zone, "x86_64"])
    return rows


def spot_usd(usd: float, region: str, zone: int) -> float:
    """The catalog's spot price in the nth zone of a region."""
    return round(usd * DEARER[region] * (1 + 0.05 * zone), 6)


def _table(path: Path, header: str, rows: list[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
