"""Calls to actors: our own errors come back as themselves, lost actors as CommError."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from spotlight.errors import CommError, RunError, SpotlightError


def get(reference: Any, timeout_s: float | None = None) -> Any:
    """The value of a call. Raises what the actor raised if it is one of ours, RunError for anything else.

    An actor that is dead, or may be, is a CommError: whether the call was carried out is unknown.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, SpotlightError):
            raise error.cause from error
        raise RunError(f"{type(error.cause).__name__} in an actor: {error.cause}") from error
    except RayActorError as error:
        raise CommError(f"an actor is gone: {str(error).splitlines()[0][:200]}") from error
    except GetTimeoutError:
        raise CommError(f"an actor did not answer within {timeout_s} s") from None
