#!/bin/bash
# Builds the node image of the cloud in a box: an overlay layer over this machine's own `/`.
#
#   image.sh IMAGE_DIR UV      IMAGE_DIR must lie on another file system than / (a tmpfs, say)
#
# What a cloud image of Ubuntu brings, and what SkyPilot would fetch from the internet, which a box has not:
# the user, sshd, uv, SkyPilot's own runtime environment.
set -euo pipefail
IMAGE=$1 UV=$2
WORK=$IMAGE.work ROOT=$IMAGE.root
mkdir -p "$IMAGE" "$WORK" "$ROOT"
mount -t overlay overlay -o "lowerdir=/,upperdir=$IMAGE,workdir=$WORK" "$ROOT"
trap 'umount -l "$ROOT/dev" "$ROOT/proc" 2>/dev/null || true; umount -l "$ROOT"; rm -rf "$WORK" "$ROOT"' EXIT
mount --bind /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
install -m 755 "$UV" "$ROOT/usr/local/bin/uv"
cat > "$ROOT/usr/local/bin/build-node" <<'IN'
set -euo pipefail
id ubuntu >/dev/null 2>&1 || useradd -m -s /bin/bash ubuntu
usermod -p '*' ubuntu
echo 'ubuntu ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/90-ubuntu
chmod 440 /etc/sudoers.d/90-ubuntu
mkdir -p /run/sshd
ssh-keygen -A
su ubuntu -c '
  set -eu
  cd ~
  unset PYTHONPATH
  export HOME=/home/ubuntu UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never
  mkdir -p .local/bin .config/uv
  cp /usr/local/bin/uv .local/bin/uv
  uv venv -q --seed skypilot-runtime --python /usr/bin/python3
  VIRTUAL_ENV=~/skypilot-runtime uv pip install -q "setuptools<70" "click<8.3.0" "ray[default]==2.9.3" \
    "pydantic-core==2.41.1" "skypilot[aws,remote]==0.14.1"
  VIRTUAL_ENV=~/skypilot-runtime uv pip uninstall -q skypilot
  uv venv -q --seed --relocatable --system-site-packages --python /usr/bin/python3 sky-user-env
  echo "offline = true" > .config/uv/uv.toml
'
IN
chroot "$ROOT" /bin/bash /usr/local/bin/build-node
rm "$ROOT/usr/local/bin/build-node"
