#!/usr/bin/env bash
# make.sh COHORT: makes this folder's files anew. Those here were made by the program of commit 1203c97.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS=1
rm -rf run model.program continued.safetensors
"$1" train --config small.yaml run.dir=run
"$1" export --run run --checkpoint last model.program
cp -a run continued
"$1" train --config small.yaml run.dir=continued run.resume=auto train.max_steps=0
mv continued/checkpoints/last/model.safetensors continued.safetensors
# What the bits of continued.safetensors follow from.
"$1" doctor | awk '$1 == "LibTorch" || $1 == "instructions" {print $1, $2}' >made_with.txt
echo "threads $OMP_NUM_THREADS" >>made_with.txt
# What is of this machine, and pictures.
rm -rf continued run/.lock run/checkpoints/.lock run/run.json run/starts run/curves.svg
