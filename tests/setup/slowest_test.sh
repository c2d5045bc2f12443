#!/usr/bin/env bash
# How scripts/slowest compares with its limits, which grow on a slow machine. Usage: slowest_test.sh SOURCE LIBTORCH
set -euo pipefail
source_root="$1"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
functions=$(sed -n '/^is_above() {/p; /^still_above() {/,/^}/p' "$source_root/scripts/slowest")

# verdicts SLOWNESS...: whether 10 s are above a limit of 5 s, where the machine is this slow at each comparison.
verdicts() {
  printf '%s\n' "$@" >"$SCRATCH/slowness"
  bash -c "set -euo pipefail
    $functions
    slowness() { sed -n 1p '$SCRATCH/slowness' && sed -i 1d '$SCRATCH/slowness'; }
    factor=1
    for _ in $*; do if still_above 10 5; then echo above; else echo below; fi; done"
}
expect "a busy moment excuses its own comparison, and no later one" 0 "above below above" verdicts 1 5 1
finish
