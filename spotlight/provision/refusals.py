"""Why a cloud gave no machine, read out of what SkyPilot says: quota, capacity and logins are told apart."""

from __future__ import annotations

import re

from spotlight.errors import CapacityError, CredentialError, PreconditionError, QuotaError, SpotlightError

_QUOTA = re.compile(
    r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded|InstanceLimitExceeded|quota", re.IGNORECASE
)
_DENIED = re.compile(
    r"AuthFailure|UnauthorizedOperation|InvalidClientTokenId|ExpiredToken|credential", re.IGNORECASE
)
# As botocore words what EC2 answers, and as Compute Engine names it.
_REFUSAL = re.compile(
    r"(?<=An error occurred )\(\w+\)[^\n]*|[^\n]*(?:QUOTA_EXCEEDED|ZONE_RESOURCE_POOL_EXHAUSTED)[^\n]*"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def translated(error: Exception, node: str, log_text: str = "") -> SpotlightError:
    """What SkyPilot said, as what the caller can do about it. Only quota in every place is a QuotaError.

    `log_text`: the launch's log, in which the cloud's refusals stand.
    """
    refusals = _REFUSAL.findall(_COLOUR.sub("", log_text))
    history = refusals or [str(item) for item in getattr(error, "failover_history", None) or [error]]
    said = "; ".join(dict.fromkeys(refusals)) or " ".join(_COLOUR.sub("", str(error)).split())
    text = f"{node}: {said[:300]}"
    kind = type(error).__name__
    if kind == "ResourcesUnavailableError":
        if all(_QUOTA.search(item) for item in history):
            return QuotaError(text, hint="ask the cloud for a higher limit, or take another region")
        return CapacityError(text, hint="another region, another GPU type, or fewer")
    if kind in ("NoCloudAccessError", "InvalidCloudCredentials") or _DENIED.search(text):
        return CredentialError(text, hint="sky check")
    return PreconditionError(f"{node}: {kind}: {said[:300]}")
