# Parts of the script that `corral launch host-setup` prints; each begins with a line `#@ NAME`.
#@ start
#!/usr/bin/env bash
# Prepares this machine for containers with GPUs. Read it, then run it as root on every node; running it again is fine.
# The GPU's kernel driver must be there already: it is not installed here.
set -euo pipefail

if [ "$(id -u)" != 0 ]; then
  echo "run this as root: sudo bash $0" >&2
  exit 1
fi
# shellcheck source=/dev/null
. /etc/os-release
#@ docker_apt
# --- docker, from its makers (Debian, Ubuntu)
export DEBIAN_FRONTEND=noninteractive
case "$ID" in
  debian | ubuntu) distribution=$ID ;;
  *) distribution=ubuntu ;;
esac
apt-get update
apt-get install -y ca-certificates curl gnupg
install -m 0755 -d /etc/apt/keyrings
curl -fsSL "@docker@/$distribution/gpg" -o /etc/apt/keyrings/docker.asc
chmod a+r /etc/apt/keyrings/docker.asc
signed="arch=$(dpkg --print-architecture) signed-by=/etc/apt/keyrings/docker.asc"
release=${UBUNTU_CODENAME:-$VERSION_CODENAME}
echo "deb [$signed] @docker@/$distribution $release stable" > /etc/apt/sources.list.d/docker.list
apt-get update
apt-get install -y docker-ce docker-ce-cli containerd.io docker-buildx-plugin
#@ docker_yum
# --- docker, from its makers (RHEL and those like it, Fedora)
# shellcheck disable=SC2016
release='$releasever' # which yum fills in
case "$ID" in
  fedora | rhel) distribution=$ID ;;
  alinux) # Alibaba Cloud Linux 2 is like CentOS 7, 3 like 8, 4 like 9
    distribution=centos
    release=$((${VERSION_ID%%.*} + 5))
    ;;
  *) distribution=centos ;;
esac
if command -v dnf > /dev/null; then yum=dnf; else yum=yum; fi
"$yum" install -y ca-certificates curl
curl -fsSL "@docker@/$distribution/docker-ce.repo" |
  sed "s#https://download.docker.com/linux#@docker@#g; s#\$releasever#$release#g" > /etc/yum.repos.d/docker-ce.repo
"$yum" install -y docker-ce docker-ce-cli containerd.io docker-buildx-plugin
#@ daemon
systemctl enable --now docker
#@ nvidia_apt
# --- NVIDIA's container toolkit
if ! command -v nvidia-smi > /dev/null; then
  echo "nvidia-smi is not here: install the driver of the GPU first" >&2
  exit 1
fi
keyring=/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg
curl -fsSL @nvidia@/gpgkey | gpg --dearmor --yes -o "$keyring"
curl -fsSL @nvidia@/stable/deb/nvidia-container-toolkit.list |
  sed "s#https://nvidia.github.io/libnvidia-container#@nvidia@#g; s#^deb #deb [signed-by=$keyring] #" \
    > /etc/apt/sources.list.d/nvidia-container-toolkit.list
apt-get update
apt-get install -y nvidia-container-toolkit
#@ nvidia_yum
# --- NVIDIA's container toolkit
if ! command -v nvidia-smi > /dev/null; then
  echo "nvidia-smi is not here: install the driver of the GPU first" >&2
  exit 1
fi
curl -fsSL @nvidia@/stable/rpm/nvidia-container-toolkit.repo |
  sed "s#https://nvidia.github.io/libnvidia-container#@nvidia@#g" > /etc/yum.repos.d/nvidia-container-toolkit.repo
"$yum" install -y nvidia-container-toolkit
#@ nvidia_check
nvidia-ctk runtime configure --runtime=docker
systemctl restart docker
# podman takes the devices from this file; write it again after the driver has changed.
mkdir -p /etc/cdi
nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml

docker info --format '{{json .Runtimes}}' | grep -q nvidia
echo "docker has the runtime nvidia; these GPUs are here:"
nvidia-smi --list-gpus
#@ amd
# --- AMD: containers need the kernel driver's devices, no toolkit
for device in /dev/kfd /dev/dri; do
  if [ ! -e "$device" ]; then
    echo "$device is not here: install the driver (amdgpu) of the GPU first" >&2
    exit 1
  fi
done
getent group video > /dev/null || groupadd --system video
getent group render > /dev/null || groupadd --system render
if [ -n "${SUDO_USER:-}" ]; then
  usermod --append --groups video,render "$SUDO_USER"
fi
#@ amd_check
docker info --format 'docker {{.ServerVersion}} is ready; these GPUs are here:'
ls /dev/dri/render*
