"""The command line over the stand-in api, as a process of its own: `python run_cli.py ARGUMENTS`.

FAKE_PAUSE_S slows the story down so that a person, or a test at a pseudo-terminal, can watch it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fakes import fake_api

if __name__ == "__main__":
    fake_api.install()
    fake_api.pause_s = float(os.environ.get("FAKE_PAUSE_S", "0"))
    from spotlight_cli.main import main

    sys.exit(main())
