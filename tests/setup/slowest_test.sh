#!/usr/bin/env bash
# How scripts/slowest compares with its limits, which grow on a slow machine, and what --check says of made-up tests and
# objects. Usage: slowest_test.sh SOURCE LIBTORCH
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

# A clone with the log of a ./test, and a build whose ctest and ninja are made up: those of the log, measured alone, take what
# the file alone.txt says. A thousand times the limit is above it on any machine.
clone="$SCRATCH/clone" programs="$SCRATCH/programs"
mkdir -p "$clone/.cohort/logs" "$clone/build/test/tests/core" "$programs"
cp -r "$source_root/scripts" "$clone/scripts"
cat >"$clone/.cohort/logs/all-tests.log" <<'LOG'
1/3 Testing: comm.SlowTest
case SlowTest.OfASuite took 5000.00 s
case SlowTest.Quick took 0.10 s
Test time = 5000.20 sec
2/3 Testing: base.SlowTest.WithoutLibTorch
Test time = 5001.00 sec
3/3 Testing: base.SlowTest.Fails
Test time = 5002.00 sec
LOG
printf '0\t5000000\t1\ta/slow.o\t1\n0\t5000000\t1\ta/gone.o\t1\n0\t900\t1\ta/quick.o\t1\n' >"$clone/build/test/.ninja_log"
printf '#!/bin/sh\nexit 0\n' >"$clone/build/test/tests/core/core_test"
cat >"$programs/ninja" <<'PROGRAM'
#!/usr/bin/env bash
case "$*" in
  *targets*) printf 'a/slow.o: CXX_COMPILER\na/quick.o: CXX_COMPILER\n' ;;
  *) awk '$1 == "object" {print $3}' "$ALONE" >"$ALONE.clock" ;;  # compiling takes so long
esac
PROGRAM
cat >"$programs/date" <<'PROGRAM'
#!/usr/bin/env bash
ahead=$(cat "$ALONE.clock" 2>/dev/null || echo 0)
case "$*" in
  +%s%3N) echo $(($("$REAL_DATE" +%s%3N) + 1000 * ahead)) ;;
  *) exec "$REAL_DATE" "$@" ;;
esac
PROGRAM
cat >"$programs/ctest" <<'PROGRAM'
#!/usr/bin/env bash
pattern=$(sed -n 's/.* -R ^\([^ ]*\)\$.*/\1/p' <<<"$*")
case "$*" in
  *' -N '*) [[ comm.SlowTest =~ ^$pattern$ || base.SlowTest.WithoutLibTorch =~ ^$pattern$ || base.SlowTest.Fails =~ ^$pattern$ ]] && echo 'Total Tests: 1' ;;
  *) awk -v pattern="^$pattern$" '
      $1 == "case" && "comm.SlowTest" ~ pattern {print "1: case " $2 " took " $3 " s"; print "1/1 Test  #1: comm.SlowTest .....   Passed " $3 " sec"}
      $1 == "test" && $2 ~ pattern {print "1/1 Test  #1: " $2 " .....   Passed " $3 " sec"}' "$ALONE" ;;
esac
PROGRAM
printf '#!/bin/sh\necho cmake version 3.25.1\n' >"$programs/cmake"
chmod +x "$programs"/* "$clone/build/test/tests/core/core_test"

# check LIST-LINE...: scripts/slowest --check with these in its list.
check() {
  rm -f "$SCRATCH/alone.txt.clock"
  printf '%s\n' '# KIND NAME  reason' "$@" >"$clone/scripts/slow_tests_and_objects.txt"
  env "PATH=$programs:$PATH" "ALONE=$SCRATCH/alone.txt" "REAL_DATE=$(command -v date)" "$clone/scripts/slowest" --check
}
printf '%s\n' 'case SlowTest.OfASuite 5000.00' 'test base.SlowTest.WithoutLibTorch 5001.00' 'object a/slow.o 5000' >"$SCRATCH/alone.txt"
expect "the slowest are printed, of those that are still there" 0 \
  "in seconds: 5002.00 base.SlowTest.Fails 5001.00 base.SlowTest.WithoutLibTorch 5000.00 comm.SlowTest.OfASuite 0.10 comm.SlowTest.Quick The 20 objects that took longest to compile, in seconds (0 where they came from ccache): 5000 a/slow.o 0.9 a/quick.o" \
  env "PATH=$programs:$PATH" "ALONE=$SCRATCH/alone.txt" "REAL_DATE=$(command -v date)" "$clone/scripts/slowest"
mkdir -p "$clone/tests/costs"
expect "what ctest is to begin with is written" 0 "tests/costs/costs.cmake has 3 tests." \
  env "PATH=$programs:$PATH" "$clone/scripts/slowest" --costs
expect "by its name, with its seconds" 0 "set_tests_properties([=[base.SlowTest.Fails]=] PROPERTIES COST 5002) set_tests_properties([=[base.SlowTest.WithoutLibTorch]=] PROPERTIES COST 5001) set_tests_properties([=[comm.SlowTest]=] PROPERTIES COST 5000)" \
  cat "$clone/tests/costs/costs.cmake"
expect "a slow test, a slow case of a suite, a test that fails alone and a slow object fail" 1 \
  "test base.SlowTest.Fails fails alone test base.SlowTest.WithoutLibTorch takes 5001.00 s test comm.SlowTest.OfASuite takes 5000.00 s object a/slow.o takes 5000" check
expect "those that are on the list have a limit, too" 1 "object a/slow.o takes 5000" \
  check "test base.SlowTest.WithoutLibTorch  a reason" "test comm.SlowTest.OfASuite  a reason" "object a/slow.o  a reason"
printf '%s\n' 'case SlowTest.OfASuite 40.00' 'test base.SlowTest.WithoutLibTorch 4.00' 'test base.SlowTest.Fails 0.50' 'object a/slow.o 20' >"$SCRATCH/alone.txt"
expect "one on the list that is below its limit passes, and what was slow beside others alone" 0 \
  "None is above but those of scripts/slow_tests_and_objects.txt." check "test comm.SlowTest.OfASuite  a reason"
finish
