#!/bin/bash
# Runs this node's part of the run's own Ray until the machine, the head or the run is gone.
#
# SkyPilot has a Ray of its own on every machine (port 6380) and starts us inside it: nothing of its settings may
# reach ours. A cluster that is launched again runs this again; two raylets would count the node's GPUs twice.
set -euo pipefail
while read -r name; do unset "$name"; done < <(compgen -e RAY_ || true)
"$(dirname "$0")/stop_ray.sh"
export PATH="$HOME/.spotlight/env/bin:$PATH"
exec "$HOME/.spotlight/env/bin/python" -m spotlight.runtime.node "${1:?head or worker}"
