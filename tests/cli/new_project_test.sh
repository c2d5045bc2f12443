#!/usr/bin/env bash
# What `cohort new project` writes, built against the build tree and trained with the commands of its README.
# Usage: new_project_test.sh SOURCE BUILD PROGRAM [CMAKE-ARGUMENT...]
set -euo pipefail
source_root="$1" build_root="$2" program="$3"
shift 3
cmake_arguments=(-G Ninja "$@")
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
unset CMAKE_PREFIX_PATH Cohort_DIR LIBTORCH_ROOT

expect "it writes a project" 0 "cd $SCRATCH/rings" "$program" new project rings --dir "$SCRATCH"
cd "$SCRATCH/rings"

# readme_command N: runs the README's N-th command, with what it leaves to its reader filled in.
readme_command() {
  local line
  line=$(sed -n 's/^    //p' README.md | sed -n "$1p")
  line=${line//=COHORT/=\'$build_root\' ${cmake_arguments[*]}}
  line=${line//runs\/rings-DATE-TIME/$(echo runs/*)}
  bash -ec "cohort() { '$program' \"\$@\"; }; $line" 2>&1 | tee "$SCRATCH/output"
  return "${PIPESTATUS[0]}"
}
accuracy_is_above() { awk -v least="$1" '$1 == "accuracy" {good = $2 > least} END {exit !good}' "$SCRATCH/output"; }

expect "it builds" 0 "librings.so" readme_command 1
expect "nothing warns" 1 "" grep -i warning "$SCRATCH/output"
expect "it trains" 0 "epoch 5/5:" readme_command 2
expect "it is evaluated" 0 "accuracy " readme_command 3
expect "it has learnt" 0 "" accuracy_is_above 0.95
finish
