#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, types, import contract, tests.
# Makes the environment where there is none. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=$(cd "${VENV:-.venv}/bin" && pwd)

echo "check: ruff"
"$bin/ruff" check .
"$bin/ruff" format --check .
echo "check: types"
"$bin/mypy"
echo "check: import contract"
"$bin/lint-imports" --no-cache
echo "check: tests"
"$bin/python" -m pytest "$@"
