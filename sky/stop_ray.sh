#!/bin/bash
# Ends this node's part of the run's own Ray, and nothing else: `ray stop` would end SkyPilot's as well.
set -euo pipefail
pid_file=$HOME/.spotlight/node.pid
[ -f "$pid_file" ] || exit 0
pid=$(cat "$pid_file")
# A process id may have been used again since: only a process of ours counts.
is_ours() { tr '\0' ' ' < "/proc/$pid/cmdline" 2>/dev/null | grep -q -- '-m spotlight.runtime.node'; }
if is_ours; then
  kill -TERM "$pid"
  for _ in $(seq 100); do is_ours || break; sleep 0.1; done
  is_ours && kill -KILL "$pid"
fi
rm -f "$pid_file"
