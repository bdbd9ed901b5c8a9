#!/bin/bash
# Makes a fresh machine a node: the run's token, and Spotlight of the very version that the run is launched with.
#
# An image may bring Spotlight along in /opt/spotlight; otherwise it is installed from the wheel that was sent, or by
# its version. All values come from the environment and are only ever used quoted.
set -euo pipefail
: "${SPOTLIGHT_VERSION:?}" "${SPOTLIGHT_PYTHON:?}" "${SPOTLIGHT_RAY_TOKEN:?}"
home=$HOME/.spotlight
umask 077
mkdir -p "$home"
printf '%s' "$SPOTLIGHT_RAY_TOKEN" > "$home/token.new"
mv "$home/token.new" "$home/token"

has_spotlight() {
  [ -x "$1/bin/spotlight" ] && [ "$("$1/bin/spotlight" --version 2>/dev/null)" = "$SPOTLIGHT_VERSION" ]
}

install_spotlight() {
  local uv=$HOME/.local/bin/uv constraints=() what
  command -v "$uv" >/dev/null || uv=uv
  what=$(find "$home/dist" -name '*.whl' -print -quit 2>/dev/null || true)
  [ -f "$home/dist/constraints.txt" ] && constraints=(--constraint "$home/dist/constraints.txt")
  "$uv" venv --quiet --clear --python "$SPOTLIGHT_PYTHON" "$1"
  "$uv" pip install --quiet --compile-bytecode --python "$1/bin/python" "${constraints[@]}" \
    "${what:-spotlight-rl==$SPOTLIGHT_VERSION}"
}

for environment in /opt/spotlight "$home/venv"; do
  if has_spotlight "$environment"; then break; fi
done
has_spotlight "$environment" || install_spotlight "$environment"
ln -sfn "$environment" "$home/env"
exec "$home/env/bin/python" -m spotlight.runtime.node check
