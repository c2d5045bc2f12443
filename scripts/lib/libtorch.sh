# shellcheck shell=bash
# Where LibTorch comes from. Sets COHORT_LIBTORCH, the folder that holds lib/libtorch_cpu.so.

LIBTORCH_AT_LEAST=2.11
LIBTORCH_BELOW=2.15
LIBTORCH_UP_TO=2.14
LIBTORCH_WHEEL=2.13.0
# What scripts/test_libtorch builds with; from 2.14 on the index may have CUDA builds alone.
# shellcheck disable=SC2034
LIBTORCH_TESTED="2.11.0 2.12.0 2.13.0 2.14.1"

# libtorch_version FOLDER: 2.13.0, or nothing where it is no LibTorch.
libtorch_version() {
  [ -f "$1/lib/libtorch_cpu.so" ] || return 0
  cat "$1/include/torch/csrc/api/include/torch/version.h" "$1/include/torch/headeronly/version.h" 2>/dev/null |
    awk '/#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]/ {v = v sep $3; sep = "."} END {print v}'
}

libtorch_fits() {
  local version
  version=$(libtorch_version "$1")
  [ -n "$version" ] && version_at_least "$version" "$LIBTORCH_AT_LEAST" && ! version_at_least "$version" "$LIBTORCH_BELOW"
}

# torch_of PYTHON: the folder of the `torch` that it can import, without importing it (which takes a second).
torch_of() {
  "$1" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')" 2>/dev/null
}

# take_libtorch FOLDER WHENCE
take_libtorch() {
  COHORT_LIBTORCH=$(cd "$1" && pwd -P)
  say "LibTorch $(libtorch_version "$1") from $2: $COHORT_LIBTORCH"
  printf '%s\n' "$COHORT_LIBTORCH" >"$COHORT_STATE/libtorch.path"
}

# named_libtorch FOLDER: --libtorch may name LibTorch's folder, a prefix path or an environment that holds it.
named_libtorch() {
  local folder
  for folder in "$1" "$1/libtorch" "$1/torch" "$1/../.." "$1/../../.." "$1"/lib/python3*/site-packages/torch; do
    if [ -f "$folder/lib/libtorch_cpu.so" ]; then
      say "$folder"
      return 0
    fi
  done
}

# find_libtorch [--libtorch FOLDER]: what is on this machine already; fails (status 1) when nothing fits.
find_libtorch() {
  local named="${1:-}" folder
  if [ -n "$named" ]; then
    folder=$(named_libtorch "$named")
    [ -n "$folder" ] || fail "--libtorch $named: there is no lib/libtorch_cpu.so in it; give the folder of an unpacked LibTorch or of a Python torch package."
    libtorch_fits "$folder" ||
      fail "--libtorch $named is LibTorch $(libtorch_version "$folder"), but Cohort builds with $LIBTORCH_AT_LEAST to $LIBTORCH_UP_TO."
    take_libtorch "$folder" "--libtorch"
    return 0
  fi
  if [ -n "${Torch_DIR:-}" ]; then
    folder=$(named_libtorch "$Torch_DIR")
    if [ -n "$folder" ] && libtorch_fits "$folder"; then
      take_libtorch "$folder" "Torch_DIR"
      return 0
    fi
    say "Torch_DIR=$Torch_DIR holds no LibTorch $LIBTORCH_AT_LEAST to $LIBTORCH_UP_TO: looking elsewhere."
  fi
  local -a prefixes=()
  IFS=':;' read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for folder in "${prefixes[@]}"; do
    folder=$(named_libtorch "$folder")
    if [ -n "$folder" ] && libtorch_fits "$folder"; then
      take_libtorch "$folder" "CMAKE_PREFIX_PATH"
      return 0
    fi
  done
  folder=$(cat "$COHORT_STATE/libtorch.path" 2>/dev/null || true)
  if [ -n "$folder" ] && libtorch_fits "$folder"; then
    take_libtorch "$folder" "the run before"
    return 0
  fi
  if command -v python3 >/dev/null; then
    folder=$(torch_of python3 || true)
    if [ -n "$folder" ]; then
      if libtorch_fits "$folder"; then
        take_libtorch "$folder" "the torch that python3 imports"
        return 0
      fi
      say "python3 imports torch $(libtorch_version "$folder"), which is not $LIBTORCH_AT_LEAST to $LIBTORCH_UP_TO: looking elsewhere."
    fi
  fi
  for folder in "$COHORT_STATE"/venv/lib/python3*/site-packages/torch "$COHORT_STATE"/test-venv/lib/python3*/site-packages/torch; do
    if libtorch_fits "$folder"; then
      take_libtorch "$folder" "an earlier download"
      return 0
    fi
  done
  return 1
}

# missing_libraries FOLDER: what the loader cannot find for libtorch_cpu.so.
missing_libraries() { ldd "$1/lib/libtorch_cpu.so" 2>/dev/null | awk '/not found/ {print $1}' | sort -u; }

# install_wheel VENV [VERSION]: torch without its Python dependencies; only headers and libraries are used.
install_wheel() {
  local venv="$1" version="${2:-$LIBTORCH_WHEEL}" python="$1/bin/python" folder missing toolkit
  need_space 3500 "LibTorch's wheel"
  # A CPU build is smaller by far; not every index has one under this name.
  if ! pip_quietly pip-torch "$venv" --no-deps "torch==$version+cpu"; then
    pip_install pip-torch "installing torch==$version with pip" "$venv" --no-deps "torch==$version"
  fi
  folder=$(torch_of "$python")
  missing=$(missing_libraries "$folder")
  if [ -n "$missing" ]; then
    missing=${missing//$'\n'/ }
    # A CUDA build's CPU part wants two small libraries of CUDA (about 15 MB); the pieces and their version stand in
    # the wheel's own metadata.
    toolkit=$("$python" -c "
import importlib.metadata as m, re
for r in m.requires('torch') or []:
    f = re.match(r'cuda-toolkit\[.*\]==([\d.]+)', r)
    if f: print('cuda-toolkit[cudart,cupti]==' + f.group(1))")
    say "This is the CUDA build; it also works without CUDA, but needs two small libraries of it (about 15 MB): $missing"
    if [ -n "$toolkit" ]; then pip_install pip-cuda "installing $toolkit with pip" "$venv" "$toolkit"; fi
    missing=$(missing_libraries "$folder")
    [ -z "$missing" ] || fail "LibTorch at $folder needs libraries that are not here: ${missing//$'\n'/ }"
  fi
}

# ensure_libtorch [FOLDER]
ensure_libtorch() {
  if find_libtorch "${1:-}"; then return 0; fi
  if [ -n "${COHORT_NO_INSTALL:-}" ]; then
    fail "no LibTorch $LIBTORCH_AT_LEAST to $LIBTORCH_UP_TO was found and --no-install was given: give --libtorch PATH."
  fi
  say "No LibTorch $LIBTORCH_AT_LEAST to $LIBTORCH_UP_TO is on this machine (looked in --libtorch, Torch_DIR, CMAKE_PREFIX_PATH, python3)."
  say "Fetching the wheel torch==$LIBTORCH_WHEEL into .cohort/venv: about 190 MB where the index has the CPU build, about"
  say "530 MB where it has the CUDA build (which works without CUDA too). Python is not used afterwards."
  ensure_venv "$COHORT_STATE/venv"
  install_wheel "$COHORT_STATE/venv"
  local folder
  folder=$(torch_of "$COHORT_STATE/venv/bin/python")
  libtorch_fits "$folder" || fail "pip installed torch, but $folder is not LibTorch $LIBTORCH_AT_LEAST to $LIBTORCH_UP_TO."
  take_libtorch "$folder" "the wheel torch==$LIBTORCH_WHEEL"
}
