#!/usr/bin/env bash
# From nothing to a measured, lossless speedup on a real model: environment, target, chats, training, measurement.
# A second run goes on from, or reuses, what is there.
#   RECIPE  what to train (default recipes/smollm2_135m_eagle.yaml)
#   VENV    the environment's folder (default .venv)
# More arguments override the recipe: bash scripts/quickstart.sh train.max_steps=1000
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=${RECIPE:-recipes/smollm2_135m_eagle.yaml}

step() { printf '\n== %s\n' "$*"; }

step "environment"
bash scripts/setup.sh
bin=$(cd "${VENV:-.venv}/bin" && pwd)
export PATH="$bin:$PATH" TOKENIZERS_PARALLELISM=false

step "target and chats"
python scripts/prepare_model.py smollm2-135m-instruct
python scripts/prepare_data.py sharegpt

step "training: accelerate launch train/eagle.py $recipe $*"
accelerate launch train/eagle.py "$recipe" "$@"
run=$(python -c 'import sys; from drafters.recipe_file import load_recipe; print(load_recipe(sys.argv[1:]).output.folder)' "$recipe" "$@")

step "is greedy output identical? (float32, as rounding can't tell two tokens apart in bfloat16)"
python eval/lossless.py "$run" --dtype float32 --num-prompts 20 --max-new-tokens 64
step "acceptance on held-out prompts, greedy and at temperature 1"
python eval/alpha.py "$run" --num-prompts 12 --max-new-tokens 64 --temperature 0 1
step "tokens per second against plain decoding"
python eval/speed.py "$run" --num-prompts 4 --max-new-tokens 64 --repeats 2 --best

step "the whole report"
cat "$run/report/report.md"
