# shellcheck shell=bash
# Python and virtual environments: only to fetch LibTorch's wheel and for the tests' oracles, never at run time.

# python_fits PROGRAM AT_LEAST: LibTorch's wheels exist from 3.10 on.
python_fits() {
  "$1" -c "import sys; sys.exit(0 if sys.version_info >= tuple(map(int, '$2'.split('.'))) else 1)" 2>/dev/null
}

# find_python AT_LEAST: sets COHORT_BASE_PYTHON.
find_python() {
  local program
  for program in "${COHORT_PYTHON_FOR_VENV:-}" python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
    if [ -n "$program" ] && command -v "$program" >/dev/null && python_fits "$program" "$1"; then
      COHORT_BASE_PYTHON=$(command -v "$program")
      return 0
    fi
  done
  if command -v apt-get >/dev/null && ! command -v python3 >/dev/null && [ "$(install_mode)" != private ]; then
    ensure_packages "to fetch LibTorch with" python3
    hash -r
    if python_fits python3 "$1"; then
      COHORT_BASE_PYTHON=$(command -v python3)
      return 0
    fi
  fi
  fail "Python $1 or newer is needed to fetch LibTorch or run the test oracles, and none is here: install python3, or give --libtorch PATH to ./quickstart."
}

# ensure_venv FOLDER [AT_LEAST]: a virtual environment with pip in it.
ensure_venv() {
  local folder="$1"
  if [ -x "$folder/bin/python" ] && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then return 0; fi
  stop_if_no_install "a virtual environment in ${folder#"$COHORT_ROOT"/}"
  find_python "${2:-3.10}"
  rm -rf "$folder"
  if "$COHORT_BASE_PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
    run_logged venv "making the virtual environment $folder" "$COHORT_BASE_PYTHON" -m venv "$folder"
    return 0
  fi
  if [ "$(install_mode)" != private ]; then
    ensure_packages "to make a virtual environment" python3-venv
    run_logged venv "making the virtual environment $folder" "$COHORT_BASE_PYTHON" -m venv "$folder"
    return 0
  fi
  # Debian keeps pip for environments in a package of its own: unpack it and start pip from its wheel.
  if ! "$COHORT_BASE_PYTHON" -c 'import venv' 2>/dev/null; then
    fail "Python's venv module is missing and only root can install it: ask for the package python3-venv, or give --libtorch PATH."
  fi
  command -v apt-get >/dev/null ||
    fail "Python's ensurepip is missing: install the package that brings it (python3-venv), or give --libtorch PATH."
  ensure_packages "to make a virtual environment" python3-pip-whl
  local wheel
  wheel=$(find "$COHORT_SYSROOT/usr/share/python-wheels" -name 'pip-*.whl' 2>/dev/null | sort -V | tail -n 1)
  [ -n "$wheel" ] || fail "python3-pip-whl holds no pip: ask for the package python3-venv, or give --libtorch PATH."
  run_logged venv "making the virtual environment $folder" "$COHORT_BASE_PYTHON" -m venv --without-pip "$folder"
  run_logged venv "putting pip into $folder" \
    "$folder/bin/python" "$wheel/pip" install -q --no-input --no-index --disable-pip-version-check "$wheel"
}

# pip_install NAME WHAT FOLDER ARGUMENT...: pip in the environment FOLDER; on a terminal its progress is shown.
pip_install() {
  local name="$1" what="$2" folder="$3"
  shift 3
  stop_if_no_install "Python packages in ${folder#"$COHORT_ROOT"/}"
  local -a command=("$folder/bin/python" -m pip install --no-input --disable-pip-version-check)
  if [ -t 1 ] && [ -z "${COHORT_VERBOSE:-}" ]; then
    if "${command[@]}" "$@" 2>"$COHORT_LOGS/$name.log" </dev/null; then return 0; fi
    tail -n 15 "$COHORT_LOGS/$name.log" >&2
    local cause
    cause=$(explain "$COHORT_LOGS/$name.log")
    fail "$what failed${cause:+: $cause} (log: $COHORT_LOGS/$name.log)."
  fi
  run_logged "$name" "$what" "${command[@]}" -q "$@"
}
