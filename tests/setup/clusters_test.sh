#!/usr/bin/env bash
# The files of examples/clusters: Kubernetes' schema has all fields of the manifest, and the batch script starts an agent on
# each node, under a Slurm that consists of three scripts.
# Usage: clusters_test.sh SOURCE LIBTORCH
set -euo pipefail
source_root="$1"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
clusters="$source_root/examples/clusters"
python="${COHORT_PYTHON:-$source_root/.cohort/test-venv/bin/python}"

check_manifest() {
  "$python" -m kubernetes_validate --strict "$1"
}
expect "the manifest is one of Kubernetes" 0 "" check_manifest "$clusters/elastic.yaml"
sed 's/completionMode/completionWay/' "$clusters/elastic.yaml" >"$SCRATCH/wrong.yaml"
expect "and a wrong key in it would be found" '!0' "completionWay" check_manifest "$SCRATCH/wrong.yaml"

mkdir "$SCRATCH/bin" "$SCRATCH/submitted"
cat >"$SCRATCH/bin/srun" <<'SH'
#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
steps=()
for ((node = 0; node < SLURM_NNODES; ++node)); do
  SLURM_NODEID=$node "$@" &
  steps+=("$!")
done
status=0
for step in "${steps[@]}"; do wait "$step" || status=$?; done
exit "$status"
SH
cat >"$SCRATCH/bin/scontrol" <<'SH'
#!/bin/bash
case "$1" in
  show) printf 'n%s\n' 1 2 3 ;;
  requeue) echo "in the queue again: $2" >>"$SLURM_SUBMIT_DIR/log" ;;
esac
SH
cat >"$SCRATCH/bin/scancel" <<'SH'
#!/bin/bash
echo "sent $*" >>"$SLURM_SUBMIT_DIR/log"
touch "$SLURM_SUBMIT_DIR/saved"
SH
# An agent that says how it was called. With "wait" as its program it runs until it is told to save.
cat >"$SCRATCH/bin/cohort" <<'SH'
#!/bin/bash
echo "node $SLURM_NODEID: $*" >>"$SLURM_SUBMIT_DIR/log"
[ "${!#}" != fail ] || exit 3
[ "${!#}" = wait ] || exit 0
touch "$SLURM_SUBMIT_DIR/began.$SLURM_NODEID"
for ((i = 0; i < 200; ++i)); do [ ! -e "$SLURM_SUBMIT_DIR/saved" ] || exit 0; read -rt 0.05 <> <(:) || true; done
exit 1
SH
chmod +x "$SCRATCH"/bin/*

batch() {
  rm -rf "$SCRATCH/submitted" && mkdir "$SCRATCH/submitted"
  env "PATH=$SCRATCH/bin:$PATH" SLURM_NNODES=3 SLURM_JOB_ID=71 SLURM_JOB_NODELIST='n[1-3]' SAVE_SECONDS=0 \
    "SLURM_SUBMIT_DIR=$SCRATCH/submitted" "SLURM_JOB_NUM_NODES=3" bash "$clusters/elastic.sbatch" "$@"
}
common="--elastic --nnodes 1:3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-id 71"
secret="--secret-file $SCRATCH/submitted/elastic-71.secret"
expect "the batch script ends as its agents do" 0 "" batch ./train --epochs '3 or 4'
expect "node 0 has the record" 0 "node 0: run $common --rdzv-conf is_host=true $secret -- ./train --epochs 3 or 4" \
  cat "$SCRATCH/submitted/log"
expect "node 2 has not" 0 "node 2: run $common --rdzv-conf is_host=false $secret -- ./train" cat "$SCRATCH/submitted/log"
expect "one agent a node" 0 "3" grep -c '^node' "$SCRATCH/submitted/log"
expect "the secret is its owner's alone" 0 "600" stat -c %a "$SCRATCH/submitted/elastic-71.secret"
expect "an agent's failure is the script's" 3 "" batch fail

# Slurm tells the batch script two minutes before the end.
saves() {
  local script began
  batch wait &
  script=$!
  for ((began = 0; began < 400; ++began)); do
    [ ! -e "$SCRATCH/submitted/began.2" ] || break
    read -rt 0.05 <> <(:) || true
  done
  kill -USR1 "$(pgrep -P "$script" -f elastic.sbatch || echo "$script")"
  wait "$script" || true
  cat "$SCRATCH/submitted/log"
}
expect "before its end the job saves, and is put into the queue again" 0 \
  "sent --signal=USR1 71.0 in the queue again: 71" saves
finish
