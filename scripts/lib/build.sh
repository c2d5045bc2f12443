# shellcheck shell=bash
# Configuring and building a preset of CMakePresets.json.

# Without these ccache compiles all anew that takes a precompiled header, as tests do.
# Paths in the project are relative in the cache, so that another build folder, clone or worktree takes what one compiled.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$COHORT_ROOT}"
export CCACHE_SLOPPINESS="${CCACHE_SLOPPINESS:-pch_defines,time_macros}"

# The build that is installed and trained with. .ci/run names the tests' own, so that the library is compiled once.
COHORT_PRESET="${COHORT_PRESET:-release}"

# What may compile the tests, the first that is there; CMakeLists.txt looks in the same order.
TEST_CLANGS=(clang-19 clang-18 clang-17 clang-16)

# test_clang: that program, if there is one.
test_clang() {
  local name
  for name in "${TEST_CLANGS[@]}"; do
    if command -v "${name/clang/clang++}"; then return 0; fi
  done
}

# version_of PROGRAM: its first line on that, or nothing.
version_of() { if [ -n "$1" ]; then "$1" --version | head -n 1 || true; fi; }

# has_sanitizers CLANG: whether it can link what scripts/sanitize asks for; it takes the newest g++'s headers, which may
# not be there.
has_sanitizers() {
  local kind
  for kind in address,undefined thread; do
    if ! printf '#include <filesystem>\n#include <ranges>\nint main() {}\n' |
      "$1" -std=c++20 "-fsanitize=$kind" -x c++ - -o "$COHORT_STATE/probe" >/dev/null 2>&1; then return 1; fi
  done
}

# configure PRESET ARGUMENT...: runs CMake when something that it depends on changed; Ninja sees to the rest.
configure() {
  local preset="$1" folder="$COHORT_ROOT/build/$1" stamp
  shift
  local -a arguments=("$@" "${COHORT_SYSROOT_ARGUMENTS[@]}")
  stamp=$(hash_of "$COHORT_ROOT/CMakePresets.json" "$COHORT_ROOT" "${CXX:-}" "$(command -v cmake)" "$(version_of "$(test_clang)")" "${arguments[@]}")
  if stamp_holds "configure-$preset" "$stamp" && [ -f "$folder/build.ninja" ]; then return 0; fi
  # A precompiled header of another version of the same compiler is an error.
  rm -f "$folder/CMakeCache.txt" "$folder"/CMakeFiles/*/cmake_pch.hxx.gch "$folder"/{tests,examples}/CMakeFiles/*/cmake_pch.hxx.gch
  run_logged "configure-$preset" "configuring the build ($preset)" \
    cmake -S "$COHORT_ROOT" --preset "$preset" "${arguments[@]}"
  set_stamp "configure-$preset" "$stamp"
  grep -E '^-- LibTorch ' "$COHORT_LOGS/configure-$preset.log" | sed 's/^-- //' || true
}

# build PRESET [TARGET...]
build() {
  local preset="$1" folder="$COHORT_ROOT/build/$1" log="$COHORT_LOGS/build-$1.log" jobs begun status=0
  shift
  jobs="${COHORT_JOBS:-$(build_jobs)}"
  begun=$SECONDS
  need_space 1500 "building"
  if [ -t 1 ] && [ -z "${COHORT_VERBOSE:-}" ]; then
    # Ninja's own progress line, and a copy of what went wrong.
    ninja -C "$folder" -j "$jobs" "$@" </dev/null || status=$?
    if [ "$status" -ne 0 ]; then fail "the build ($preset) failed; the first error stands above."; fi
  elif [ -n "${COHORT_VERBOSE:-}" ]; then
    ninja -C "$folder" -j "$jobs" "$@" </dev/null 2>&1 | tee "$log"
    if [ "${PIPESTATUS[0]}" -ne 0 ]; then fail "the build ($preset) failed."; fi
  elif ! ninja -C "$folder" -j "$jobs" "$@" >"$log" 2>&1 </dev/null; then
    grep -E -A 12 '^FAILED|error:' "$log" | head -n 60 >&2 || tail -n 30 "$log" >&2
    local cause
    cause=$(explain "$log")
    fail "the build ($preset) failed${cause:+: $cause} (log: $log)."
  fi
  say "Built $preset in $(elapsed $((SECONDS - begun))) with $jobs $([ "$jobs" -eq 1 ] && echo job || echo jobs)."
}
