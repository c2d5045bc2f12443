#!/usr/bin/env bash
# Which programs scripts/sanitize readers leaves out, in a small project. Usage: sanitized_test.sh SOURCE LIBTORCH
# shellcheck disable=SC2016 # the shell that `call` starts expands
set -euo pipefail
source_root="$1"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
tree="$SCRATCH/tree"
mkdir -p "$tree"/{cohort/base,cohort/net,cohort/with_torch,tests/base,tests/net/data,tests/support,tests/golden,scripts/suppressions,build,.cohort}
cp -r "$source_root/cmake" "$tree/cmake"
cp -r "$source_root/scripts/lib" "$tree/scripts/lib"
touch "$tree/CMakePresets.json" "$tree/scripts/sanitize" "$tree/scripts/suppressions/threads.txt"

# Programs base_test and net_test, of libraries base and net. What needs LibTorch is another affair.
cat >"$tree/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.22)
project(probe LANGUAGES CXX)
set(COHORT_READERS_ONLY ON)
set(COHORT_UNITY OFF)
list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_SOURCE_DIR}/cmake")
include(CohortTargets)
include(CohortTestSources)
function(gtest_discover_tests)
endfunction()
add_library(Threads::Threads INTERFACE IMPORTED GLOBAL)
add_library(GTest::gtest_main INTERFACE IMPORTED GLOBAL)
add_library(cohort_test_support INTERFACE)
add_library(cohort_test_flags INTERFACE)
add_subdirectory(cohort/base)
add_subdirectory(cohort/net)
add_subdirectory(cohort/with_torch)
add_subdirectory(tests)
cohort_write_test_sources("${PROJECT_BINARY_DIR}/test_sources.txt")
CMAKE
printf 'add_subdirectory(base)\nadd_subdirectory(net)\n' >"$tree/tests/CMakeLists.txt"
printf 'cohort_library(base SOURCES base.cpp)\n' >"$tree/cohort/base/CMakeLists.txt"
printf 'cohort_library(net SOURCES net.cpp PRIVATE_LIBS $<BUILD_INTERFACE:cohort::base>)\n' >"$tree/cohort/net/CMakeLists.txt"
printf 'cohort_library(with_torch TORCH SOURCES with_torch.cpp LIBS cohort::net)\n' >"$tree/cohort/with_torch/CMakeLists.txt"
printf 'cohort_test(base SOURCES base_test.cpp LIBS cohort::base)\n' >"$tree/tests/base/CMakeLists.txt"
printf 'cohort_test(net SOURCES net_test.cpp LIBS cohort::net)\ncohort_test(net_torch SOURCES torch_test.cpp LIBS cohort::with_torch)\n' \
  >"$tree/tests/net/CMakeLists.txt"
printf '#include "cohort/base/base.h"\n' >"$tree/cohort/base/base.cpp"
touch "$tree"/cohort/base/{base.h,not_included.h} "$tree/cohort/net/inner.h" "$tree/tests/net/data/frames.txt"
printf '#  include "inner.h"\n' >"$tree/cohort/net/net.h"
printf '#include <cohort/net/net.h>\n' >"$tree/cohort/net/net.cpp"
touch "$tree/cohort/with_torch/with_torch.cpp" "$tree/tests/net/torch_test.cpp" "$tree/tests/golden/orders.txt"
printf '#include "cohort/base/base.h"\n#include "tests/support/golden.h"\n' >"$tree/tests/base/base_test.cpp"
printf 'path golden(string name) { return source_dir() / "tests/golden" / name; }\n' >"$tree/tests/support/golden.h"
printf '#if HAS_NET\n#include "cohort/net/net.h"\n#endif\n' >"$tree/tests/net/net_test.cpp"

# describe: has CMake write what each program is built from. scripts/sanitize has Ninja do so.
describe() {
  if ! cmake -G Ninja -S "$tree" -B "$tree/build/readers-asan" >"$SCRATCH/cmake.log" 2>&1; then cat "$SCRATCH/cmake.log" && exit 1; fi
}
# call FUNCTION-TEXT: with functions of scripts/lib.
call() {
  COHORT_COMMAND=scripts/sanitize COHORT_ROOT="$tree" sources="$tree/build/readers-asan/test_sources.txt" bash -c "set -euo pipefail
    . '$source_root/scripts/lib/common.sh'
    . '$source_root/scripts/lib/sanitized.sh'
    $1"
}
choose() { call 'choose_programs "$sources"; printf "run:%s." "${changed[*]}"'; }
pass() {
  call 'note_programs "$sources"; record_programs' >/dev/null
  cp "$tree/.cohort/sanitized.txt" "$tree/scripts/sanitized.txt"
}
# after TITLE WANTED COMMAND...: after the change the WANTED programs are run; then all pass.
after() {
  local title="$1" wanted="$2"
  shift 2
  "$@"
  expect "$title" 0 "run:$wanted." choose
  pass
}
append() { printf '\n# changed\n' >>"$tree/$1"; }

describe
expect "where nothing is known, all are run" 0 "There is no scripts/sanitized.txt, so every program of tests is run. Changed: base_test net_test run:base_test net_test." choose
pass
expect "where nothing changed, none is, and the output says so" 0 \
  "(scripts/sanitized.txt): base_test net_test Nothing is left to run. run:." choose
after "a library's source" "net_test" append cohort/net/net.cpp
after "a source of a library that another one links" "base_test net_test" append cohort/base/base.cpp
after "a header that a header includes" "net_test" append cohort/net/inner.h
comment() { sed -i '1i // a comment' "$tree/$1"; }
after "a comment" "" comment cohort/net/inner.h
raw_string() { printf 'auto text = R"(\n// text\n)";\n' >>"$tree/$1"; }
after "a raw string" "net_test" raw_string cohort/net/inner.h
after "a line of it that looks like a comment" "net_test" sed -i 's/^\/\/ text/\/\/ another/' "$tree/cohort/net/inner.h"
after "a header that nothing includes" "" append cohort/base/not_included.h
after "a test" "base_test" append tests/base/base_test.cpp
after "data beside a test" "net_test" append tests/net/data/frames.txt
after "a file of a folder that a header names" "base_test" append tests/golden/orders.txt
after "what needs LibTorch, and its test" "" append cohort/with_torch/with_torch.cpp
after "the declaration of a library" "net_test" append cohort/net/CMakeLists.txt
after "what is suppressed" "base_test net_test" append scripts/suppressions/threads.txt
after "a header is gone" "net_test" rm "$tree/cohort/net/inner.h"
new_program() {
  printf 'cohort_test(base_more SOURCES more_test.cpp)\n' >>"$tree/tests/base/CMakeLists.txt" && touch "$tree/tests/base/more_test.cpp" && describe
}
after "a new program, and the folder of the old one" "base_more_test base_test" new_program
expect "what is edited while it is tested has not passed" 0 "run:net_test." \
  call 'note_programs "$sources"; echo >>"$COHORT_ROOT/cohort/net/net.cpp"; record_programs; cp "$COHORT_ROOT/.cohort/sanitized.txt" "$COHORT_ROOT/scripts/"; choose_programs "$sources"; printf "run:%s." "${changed[*]}"'
printf 'base_test one two three\nnonsense\n' >"$tree/scripts/sanitized.txt"
expect "a record that was not written by the script leaves nothing out" 0 "run:base_more_test base_test net_test." choose
expect "without Python all are run" 0 "What changed is not known, so every program of tests is run." \
  call 'python3() { return 1; }; COHORT_PYTHON= choose_programs "$sources"'
expect "names of ctest's" 0 "^net\\.|^fuzz\\.net_ring\$" call 'ctest_names net_test net_ring_replay'
finish
