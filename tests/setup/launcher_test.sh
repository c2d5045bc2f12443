#!/usr/bin/env bash
# cmake/CohortLauncher.cmake and cmake/compile.sh on a machine that has no ccache and no clang, and on one that has ccache.
# Usage: launcher_test.sh SOURCE LIBTORCH
set -euo pipefail
source_root="$1"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
compiler=$(command -v g++ || command -v c++)
mkdir -p "$SCRATCH/project" "$SCRATCH/programs"
# All that is on the PATH, the first of each name, but for these.
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
  if [ -d "$folder" ]; then find "$folder/" -maxdepth 1 ! -type d -exec ln -s -t "$SCRATCH/programs" {} + 2>/dev/null || true; fi
done
rm -f "$SCRATCH"/programs/{ccache,clang}*
cat >"$SCRATCH/project/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.22)
project(probe LANGUAGES CXX)
set(COHORT_BUILD_TESTS ON)
set(COHORT_CCACHE ON)
set(COHORT_CLANG_FOR_TESTS ON)
include("${LAUNCHER}")
if(COHORT_TESTS_BY_CLANG)
  message(FATAL_ERROR "clang is found")
endif()
add_executable(probe probe.cpp)
target_precompile_headers(probe PRIVATE <cstdio>)
CMAKE
printf 'int main() { std::puts("compiled and run"); }\n' >"$SCRATCH/project/probe.cpp"

# build NAME: with the programs of that folder alone; CMake would look in the system's folders too.
build() {
  env -u CCACHE_DIR -u CMAKE_PREFIX_PATH "PATH=$SCRATCH/programs" cmake -G Ninja -S "$SCRATCH/project" -B "$SCRATCH/$1" \
    "-DCMAKE_CXX_COMPILER=$compiler" -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF \
    "-DLAUNCHER=$source_root/cmake/CohortLauncher.cmake" -DCMAKE_BUILD_TYPE=Release &&
    env "PATH=$SCRATCH/programs" cmake --build "$SCRATCH/$1" && "$SCRATCH/$1/probe"
}
expect "without ccache and clang it configures, builds and runs" 0 "compiled and run" build plain
expect "each source is compiled through compile.sh" 0 "compile.sh" grep -rhm 1 --include=*.ninja compile.sh "$SCRATCH/plain"
expect "and nothing else" 1 "" grep -rhE --include=*.ninja 'compile\.sh.* --(through|with) ' "$SCRATCH/plain"
printf '#!/bin/sh\nprintf "%%s\\n" "$*" >>"%s"\nexec "$@"\n' "$SCRATCH/through" >"$SCRATCH/programs/ccache"
chmod +x "$SCRATCH/programs/ccache"
expect "with ccache it does, too" 0 "compiled and run" build cached
expect "and the source is compiled through it" 0 "probe.cpp" grep -o 'probe.cpp$' "$SCRATCH/through"
finish
