#!/usr/bin/env bash
# Makes the project's environment: a virtual environment with the project, editable, and what its checks need.
#   PYTHON  the interpreter to use (default python3, 3.10 or newer)
#   VENV    the environment's folder (default .venv in this checkout)
#   EXTRAS  extras to install (default dev)
# A second run does nothing unless pyproject.toml has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}
extras=${EXTRAS:-dev}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "setup: $python is $("$python" --version 2>&1), but Python 3.10 or newer is needed; name one with PYTHON=..." >&2
  exit 1
fi

stamp=$venv/.drafters-stamp
state="$(cat pyproject.toml scripts/setup.sh | sha256sum) $extras $PWD"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
  exit 0
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    echo "setup: a GPU is here: installing torch as the package index has it"
    "${pip[@]}" 'torch>=2.6'
  else
    echo "setup: no GPU is here: installing the CPU build of torch"
    # A CPU wheel that pip already finds (a find-links folder), else PyTorch's own index of CPU builds.
    "${pip[@]}" 'torch==2.13.0+cpu' 2>/dev/null ||
      "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu 'torch>=2.6'
  fi
fi
echo "setup: installing the project and its tools"
"${pip[@]}" -e ".[$extras]"
printf '%s' "$state" >"$stamp"
echo "setup: done; activate it with: source $venv/bin/activate"
