#!/usr/bin/env bash
# Kills `cohort train` at each system call by which it changes its folder, before the kernel does it and after, and
# goes on: the run must end with the bits of one that was left alone. Usage: kill_at_calls_test.sh COHORT
set -euo pipefail
cohort=$1
command -v strace >/dev/null || exit 77 # skipped
folder=$(mktemp -d "${TMPDIR:-/tmp}/cohort kills XXXXXX")
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >run.yaml <<'YAML'
model: {name: mlp, num_classes: 4, options: {hidden: "8"}}
data: {kind: synthetic, synthetic_train: 20, synthetic_val: 12, image_size: 4, color: grey, workers: 0, mean: [0.4], std: [0.3]}
train: {epochs: 2, batch_size: 4, threads: 1, device: cpu}
run: {progress: off, tensorboard: false, keep: 1, save_every_steps: 2}
YAML

# train DIR [WORD...]: trains in DIR; WORD... is the program to do it under.
train() {
  local dir=$1
  shift
  "$@" "$cohort" train --config run.yaml run.dir="$dir" run.resume=auto >log 2>&1
}

fail() {
  printf 'killed at call %s of %s: %s\n' "$number" "$call$fault" "$1" >&2
  tail -n 20 log >&2
  exit 1
}

call="" number=0 kills=0 fault=""
train straight || fail "not killed at all"
for call in mkdir write pwrite64 ftruncate fsync rename renameat2 symlink unlink unlinkat rmdir; do
  for fault in "" :error=EIO; do # after the call, in its place
    for ((number = 1; ; ++number)); do
      rm -rf killed
      status=0
      # In a shell of its own, which says nothing of the kill.
      (train killed strace -f -o /dev/null -e trace="$call" -e inject="$call:signal=KILL:when=$number$fault") \
        2>/dev/null || status=$?
      if [ "$status" -eq 0 ]; then break; fi
      if [ "$status" -ne 137 ]; then fail "status $status, expected 137"; fi
      kills=$((kills + 1))
      train killed || fail "it does not go on"
      for file in model.safetensors optimizer.safetensors; do
        cmp -s "killed/checkpoints/last/$file" "straight/checkpoints/last/$file" || fail "$file differs"
      done
    done
  done
done
printf '%s kills\n' "$kills"
[ "$kills" -ge 200 ]
