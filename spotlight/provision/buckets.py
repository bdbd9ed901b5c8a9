"""A run's bucket as the user's own machine opens it: with whatever login the cloud's own tools have there.

On the machines of a run the role of the machine is the login, and `store.open_store` finds it by itself.
"""

from __future__ import annotations

import os

from spotlight.store.objects import ObjectStore, open_store


def open_bucket(url: str) -> ObjectStore:
    """Open `s3://` with boto3's login unless the environment has keys, anything else as it is."""
    if not url.startswith("s3://") or os.environ.get("AWS_ACCESS_KEY_ID"):
        return open_store(url)
    from spotlight.provision import aws

    credentials, options = aws.bucket_login()
    return open_store(url, credentials=credentials, **options)
