#!/usr/bin/env bash
# Kills `cohort train` at each of its calls of the system that change its folder, before the kernel does it and after,
# and continues: the run must end with the bits of one that was left alone. Usage: kill_at_calls_test.sh COHORT
set -euo pipefail
cohort=$1
folder=$(mktemp -d "${TMPDIR:-/tmp}/cohort kills XXXXXX")
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >run.yaml <<'YAML'
model: {name: mlp, num_classes: 4, options: {hidden: "8"}}
data: {type: synthetic, synthetic_train: 20, synthetic_val: 12, image_size: 4, color: gray, workers: 0, mean: [0.4], std: [0.3]}
train: {epochs: 2, batch_size: 4, threads: 1, device: cpu}
run: {progress: off, tensorboard: false, keep: 1, save_every_steps: 2}
YAML

# train DIR [WORD...]: trains in DIR; WORD... is the program to do it under.
train() {
  local dir=$1
  shift
  "$@" "$cohort" train --config run.yaml run.dir="$dir" run.resume=auto >log 2>&1
}

# kill_at N CALL SIGNAL: the words that end a program at its N-th CALL. A signal that waits when a call begins keeps the
# kernel from it if it is SIGKILL, and else comes when it is done.
kill_at() { words=(strace -f -o strace.log -e trace="?$2" -e inject="?$2:signal=$3:when=$1"); }

fail() {
  printf 'kill_at_calls_test: %s\n' "$1" >&2
  tail -n 20 log >&2
  exit 1
}

touch log
for moment in "KILL 137 before" "VTALRM 154 after"; do
  read -r signal status name <<<"$moment"
  kill_at 1 'mkdir,?mkdirat' "$signal"
  got=0
  ("${words[@]}" mkdir "$name") 2>/dev/null || got=$?
  if [ "$got" -ne "$status" ]; then # no strace, or it may not trace
    printf 'skipped: strace gave %s\n' "$got"
    exit 77
  fi
done
if [ -e before ] || [ ! -e after ]; then fail "strace does not kill before and after a call"; fi

kills=0
train straight || fail "not killed at all, it fails"
# strace counts calls thread by thread: those of a run's folder are made on one.
# openat is not in the list: files are opened by the hundred, libraries mostly. What comes after it is.
for call in mkdir mkdirat write pwrite64 ftruncate fsync rename renameat renameat2 symlink symlinkat unlink unlinkat rmdir; do
  for moment in "KILL 137" "VTALRM 154"; do
    read -r signal status <<<"$moment"
    for ((number = 1; ; ++number)); do
      rm -rf killed
      kill_at "$number" "$call" "$signal"
      got=0
      # In a shell of its own, which says nothing of the kill.
      (train killed "${words[@]}") 2>/dev/null || got=$?
      if [ "$got" -eq 0 ]; then break; fi
      at="at call $number of $call by SIG$signal"
      if [ "$got" -ne "$status" ]; then fail "killed $at: status $got, expected $status"; fi
      kills=$((kills + 1))
      train killed || fail "killed $at, it does not resume"
      for file in model.safetensors optimizer.safetensors; do
        cmp -s "killed/checkpoints/last/$file" "straight/checkpoints/last/$file" || fail "killed $at, $file differs"
      done
    done
  done
done
printf '%s kills\n' "$kills"
if [ "$kills" -lt 200 ]; then fail "$kills kills, expected 200 or more"; fi
