#!/usr/bin/env bash
# The sentences in which ./quickstart and ./test fail. Usage: messages_test.sh SOURCE LIBTORCH
# Runs a copy of the scripts in a scratch clone, so that nothing of this one changes.
set -euo pipefail
source_root="$1" libtorch="$2"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
unset Torch_DIR CMAKE_PREFIX_PATH LIBTORCH_ROOT
clone="$SCRATCH/clone"
mkdir -p "$clone"
cp -r "$source_root/scripts" "$source_root/quickstart" "$source_root/test" "$source_root/CMakePresets.json" "$clone"

# fake_program FOLDER NAME TEXT: a program that is the shell script TEXT.
fake_program() {
  rm -f "$1/$2"
  printf '#!/bin/sh\n%s\n' "$3" >"$1/$2"
  chmod +x "$1/$2"
}
# without NAME... : a PATH on which these programs are not to be found, and on which every package seems installed and
# the build tools are there, so that nothing is fetched whatever this machine has.
without() {
  local folder name
  folder=$(mktemp -d "$SCRATCH/path XXXX")
  for name in bash sh env cat cut df awk grep sed tail head mkdir rm dirname basename sha256sum id nproc sort find ls date \
    readlink ln mv tr wc uname timeout sleep apt-get dpkg-deb g++ c++ cc gcc as ld python3 ldd sudo; do
    if [[ " $* " != *" $name "* ]] && command -v "$name" >/dev/null; then ln -s "$(command -v "$name")" "$folder/$name"; fi
  done
  fake_program "$folder" dpkg-query 'printf installed'
  fake_program "$folder" cmake 'echo cmake version 3.25.1'
  fake_program "$folder" ninja 'echo 1.11.1'
  fake_program "$folder" clang++-19 'exit 0'
  printf '%s\n' "$folder"
}

for command in quickstart test; do
  expect "./$command --help" 0 "Usage: ./$command" "$clone/$command" --help
  expect "./$command: unknown option" 1 "./$command: unknown option --fast; see ./$command --help." "$clone/$command" --fast
  expect "./$command: a value is missing" 1 "--libtorch needs a value" "$clone/$command" --libtorch
  expect "./$command: jobs" 1 "--jobs many is not a positive number" "$clone/$command" --jobs many
done

expect "LibTorch that is not there" 1 "--libtorch /nowhere: there is no lib/libtorch_cpu.so in it" \
  env "PATH=$(without)" COHORT_NO_INSTALL=1 "$clone/quickstart" --libtorch /nowhere
old="$SCRATCH/old"
mkdir -p "$old/lib" "$old/include/torch/csrc/api/include/torch"
touch "$old/lib/libtorch_cpu.so"
printf '#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 4\n#define TORCH_VERSION_PATCH 1\n' \
  >"$old/include/torch/csrc/api/include/torch/version.h"
expect "LibTorch that is too old" 1 "is LibTorch 2.4.1, but Cohort builds with 2.11 to 2.14." \
  env "PATH=$(without)" "$clone/quickstart" --libtorch "$old"
bare=$(without)
fake_program "$bare" python3 'exit 1'
expect "no LibTorch and nothing may be installed" 1 "no LibTorch 2.11 to 2.14 was found and --no-install was given" \
  env "PATH=$bare" "$clone/quickstart" --no-install

expect "no environment for the tests and nothing may be installed" 1 \
  "--no-install was given, and this is missing: a virtual environment in .cohort/test-venv" \
  env "PATH=$(without)" "$clone/test" --no-install --setup-only
if [ "$(id -u)" -eq 0 ] || ! command -v sudo >/dev/null; then
  expect "no compiler" 1 "there is no C++ compiler" \
    env -u CXX COHORT_PRIVATE=1 "PATH=$(without g++ c++ clang++)" "$clone/quickstart" --libtorch "$libtorch"
fi
ancient=$(without g++ c++)
fake_program "$ancient" c++ 'case "$*" in *dumpversion*) echo 9.4.0 ;; *) exit 1 ;; esac'
expect "a compiler that is too old" 1 "(version 9.4.0) cannot build C++20" \
  env -u CXX "PATH=$ancient" "$clone/quickstart" --libtorch "$libtorch"
unpackaged=$(without)
rm -rf "$clone/.cohort"
fake_program "$unpackaged" dpkg-query 'exit 1'
expect "a package is missing and nothing may be installed" 1 "apt-get install libspdlog-dev" \
  env "PATH=$unpackaged" "$clone/quickstart" --no-install --libtorch "$libtorch"
fake_program "$unpackaged" apt-get 'echo "Could not resolve the name of the mirror"; exit 100'
expect "no network, packages" 1 "because the network (or the package index) cannot be reached" \
  env COHORT_PRIVATE=1 "PATH=$unpackaged" "$clone/quickstart" --libtorch "$libtorch"
full=$(without df)
fake_program "$full" df 'echo "Filesystem 1M Used Free"; echo "/dev/x 100 90 10"'
fake_program "$full" python3 'exec /usr/bin/env -i '"$(command -v python3)"' -S "$@"'
expect "the disk is full" 1 "MB free, but" env "PATH=$full" "$clone/test" --setup-only

# Functions of scripts/lib, called alone.
cat >"$SCRATCH/call" <<SCRIPT
set -euo pipefail
COHORT_COMMAND=./quickstart COHORT_ROOT='$clone'
for part in common packages python test_env build; do . '$clone/scripts/lib/'\$part.sh; done
make_state_folder
SCRIPT
# call FUNCTION-TEXT
call() {
  bash -c ". '$SCRATCH/call'; $1"
}
expect "a Python that is too old" 1 "Python 3.10 or newer is needed" env COHORT_PRIVATE=1 \
  bash -c ". '$SCRATCH/call'; python_fits() { return 1; }; find_python 3.10"
expect "an old CMake is not taken" 1 "" call "cmake() { echo 'cmake version 3.18.4'; }; cmake_fits cmake"
expect "a newer CMake is" 0 "" call "cmake() { echo 'cmake version 3.25.1'; }; cmake_fits cmake"
cores=$(env -u OMP_NUM_THREADS nproc)
expect "OMP_NUM_THREADS is not the number of cores" 0 "cores: $cores" \
  env OMP_NUM_THREADS=$((cores + 1)) bash -c ". '$SCRATCH/call'; printf 'cores: %s' \"\$(COHORT_CORES= usable_cores)\""
cause() { call "printf '%s\n' '$1' >'$SCRATCH/log'; explain '$SCRATCH/log'"; }
expect "a full disk is told" 0 "the disk is full" cause "OSError: [Errno 28] No space left on device"
expect "no network is told" 0 "the network (or the package index) cannot be reached" cause "Max retries exceeded with url"
quoted() { printf 'cause: %s.' "$(cause "$1")"; }
expect "what a compiler quotes is no network" 0 "cause: ." quoted "  118 |   expect_in(err, {\"Connection refused\"});"
expect "no build for this Python is told" 0 "the package index has no build for this Python" \
  cause "ERROR: No matching distribution found for torch==2.13.0"
expect "no memory is told" 0 "memory ran out (try --jobs 1)" cause "g++: fatal error: Killed signal terminated program cc1plus"

# Of two tests one failed, which waits, as all of comm do here. ctest is a function.
tested="$clone/build/test/Testing/Temporary"
mkdir -p "$tested"
printf '^comm\\..*(Late)\n' >"$clone/build/test/waiting_tests.txt"
cat >"$tested/LastTest.log" <<'LOG'
1/2 Testing: base.Other
passing.cpp:3: Failure
Test Passed.
2/2 Testing: comm.LateCallTest
late_call_test.cpp:12: Failure
Test Failed.
LOG
# alone STATUS NAME...: those failed, and ctest ends with STATUS when they run alone.
alone() {
  local status="$1"
  shift
  printf '7:%s\n' "$@" >"$SCRATCH/failed.log"
  call "ctest() {
    case \"\$*\" in
      *' -LE slow '*) cp '$SCRATCH/failed.log' '$tested/LastTestsFailed.log' && return 8 ;;
      *'^($(paste -s -d '|' <<<"${*// /$'\n'}"))\$ --no-tests=error'*) return $status ;;
    esac
    return 9
  }
  run_tests test"
}
expect "the assertion that failed is shown, of no test that passed" 1 \
  "What failed: 2/2 Testing: comm.LateCallTest late_call_test.cpp:12: Failure" alone 0 comm.LateCallTest base.Other
expect "a test that waits passes alone" 0 "100% tests passed out of 2, these when they ran alone: comm.LateCallTest" \
  alone 0 comm.LateCallTest
expect "a test that waits fails alone" 1 "Once more, alone:" alone 8 comm.LateCallTest
expect "more than three do not run again" 1 "What failed:" alone 0 comm.Late1 comm.Late2 comm.Late3 comm.Late4
expect "where no test ran, none passes" 1 "" call "ctest() { return 8; }; run_tests test"
finish
