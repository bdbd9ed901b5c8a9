"""What moto's EC2 lacks of a spot market: prices that are some, and machines that run out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import world
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.responses.spot_instances import SpotInstances

ABOVE_CATALOG = 1.1  # catalogs are behind
SINCE_S = time.time() - 86_400


def open_market(refused: Path) -> None:
    """Give EC2 a price history, and let it refuse machines in the zones that the file names, with its error codes."""
    SpotInstances.describe_spot_price_history = _history
    run_instances = EC2Backend.run_instances

    def asked(self, *arguments, **options):
        codes = json.loads(refused.read_text()) if refused.exists() else {}
        subnets = [options.get("subnet_id"), *(nic.get("SubnetId") for nic in options.get("nics") or ())]
        zones = [self.get_subnet(subnet).availability_zone for subnet in subnets if subnet]
        for zone in [*zones, options.get("placement")]:
            if zone in codes:
                raise EC2ClientError(codes[zone], f"no machine of that kind in {zone}")
        return run_instances(self, *arguments, **options)

    EC2Backend.run_instances = asked


def _history(self) -> ActionResult:
    """The price of a day ago still holds."""
    kinds = self._get_param("InstanceTypes", [])
    zones = self._filters_from_querystring().get("availability-zone")
    names = [zone.name for zone in self.ec2_backend.describe_availability_zones()][: world.ZONES_PER_REGION]
    rows = [
        {
            "InstanceType": kind,
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": f"{world.spot_usd(usd, self.region, i) * ABOVE_CATALOG:.6f}",
            "AvailabilityZone": zone,
            "Timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(SINCE_S)),
        }
        for kind, *_, usd in world.MACHINES
        for i, zone in enumerate(names)
        if kind in kinds and (not zones or zone in zones)
    ]
    return ActionResult({"SpotPriceHistory": rows})
