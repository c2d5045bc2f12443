#!/usr/bin/env bash
# cmake/FindLibTorch.cmake against every shape that LibTorch comes in. Usage: find_libtorch_test.sh SOURCE LIBTORCH
set -euo pipefail
source_root="$1" libtorch="$2"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
unset Torch_DIR CMAKE_PREFIX_PATH LIBTORCH_ROOT

mkdir -p "$SCRATCH/project"
cat >"$SCRATCH/project/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.22)
project(probe LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "${MODULES}")
find_package(LibTorch 2.11 REQUIRED)
add_executable(probe probe.cpp)
target_link_libraries(probe PRIVATE LibTorch::LibTorch)
CMAKE
cat >"$SCRATCH/project/probe.cpp" <<'CPP'
#include <c10/core/Device.h>
#include <cstdio>
int main() { std::printf("device %s\n", c10::Device("cpu").str().c_str()); }
CPP

# configure NAME ARGUMENT...
configure() {
  local name="$1"
  shift
  cmake -G Ninja -S "$SCRATCH/project" -B "$SCRATCH/build $name" "-DMODULES=$source_root/cmake" \
    -DPython3_EXECUTABLE=/bin/false -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON "$@"
}
build_and_run() {
  cmake --build "$SCRATCH/build $1" && "$SCRATCH/build $1/probe"
}

# fake NAME: a folder with the headers and libraries of the real one, by links; returns its path.
fake() {
  local root="$SCRATCH/$1" file
  mkdir -p "$root/lib"
  ln -s "$libtorch/include" "$root/include"
  for file in "$libtorch"/lib/*.so*; do ln -s "$file" "$root/lib/"; done
  printf '%s\n' "$root"
}

version=$(awk '/#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]/ {v = v sep $3; sep = "."} END {print v}' \
  "$libtorch/include/torch/csrc/api/include/torch/version.h" \
  "$([ -f "$libtorch/include/torch/headeronly/version.h" ] && echo "$libtorch/include/torch/headeronly/version.h" || echo /dev/null)")

expect "the LibTorch of this build" 0 "LibTorch $version at $libtorch" configure real "-DLIBTORCH_ROOT=$libtorch"
expect "it links and runs" 0 "device cpu" build_and_run real
expect "Torch_DIR" 0 "LibTorch $version at $libtorch" configure torch_dir "-DTorch_DIR=$libtorch/share/cmake/Torch"
expect "CMAKE_PREFIX_PATH as torch.utils gives it" 0 "LibTorch $version at" configure prefix "-DCMAKE_PREFIX_PATH=$libtorch/share/cmake"
expect "CMAKE_PREFIX_PATH in the environment" 0 "LibTorch $version at" env "CMAKE_PREFIX_PATH=/nowhere:$libtorch" \
  cmake -G Ninja -S "$SCRATCH/project" -B "$SCRATCH/build environment" "-DMODULES=$source_root/cmake" -DPython3_EXECUTABLE=/bin/false

archive=$(fake "unpacked archive")
printf '%s\n' "$version" >"$archive/build-version"
expect "an unpacked archive, its path with a space" 0 "at $archive" configure archive "-DLIBTORCH_ROOT=$archive"
expect "it links and runs" 0 "device cpu" build_and_run archive

# A CUDA wheel on a machine without a toolkit: its libtorch_cpu.so names libraries of CUDA that only the loader needs.
cuda=$(fake "cuda wheel")
for name in torch_cuda c10_cuda; do
  if [ ! -e "$cuda/lib/lib$name.so" ]; then
    printf 'void cudaLaunch(void);void use_%s(void) {cudaLaunch();}\n' "$name" | cc -shared -fPIC -x c - -o "$cuda/lib/lib$name.so"
  fi
done
expect "a CUDA wheel without a toolkit" 0 "CUDA build, no CUDA toolkit found" configure cuda "-DLIBTORCH_ROOT=$cuda"
expect "it links and runs" 0 "device cpu" build_and_run cuda

old=$(fake "old")
rm "$old/include"
mkdir -p "$old/include/torch/csrc/api/include/torch"
printf '#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 4\n#define TORCH_VERSION_PATCH 1\n' \
  >"$old/include/torch/csrc/api/include/torch/version.h"
expect "too old" '!0' "LibTorch 2.4.1 at $old is too old: Cohort needs 2.11 to 2.14" configure old "-DLIBTORCH_ROOT=$old"
expect "a folder that is no LibTorch" '!0' "LIBTORCH_ROOT is $SCRATCH/project, but lib/libtorch_cpu.so" \
  configure wrong "-DLIBTORCH_ROOT=$SCRATCH/project"
expect "none at all" '!0' "Try: ./quickstart --libtorch PATH" configure none
finish
