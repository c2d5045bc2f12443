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

# A package index that answers nothing for 30 s is asked again, twice by pip and twice by us: pip does not try again
# where a download breaks off. An attempt ends after half an hour, whatever still comes in.
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-30}" PIP_RETRIES="${PIP_RETRIES:-2}"
PIP_ATTEMPTS=3
PIP_ATTEMPT_SECONDS="${PIP_ATTEMPT_SECONDS:-1800}"
PIP_PAUSE_SECONDS="${PIP_PAUSE_SECONDS:-5}"

# pip_attempts NAME COMMAND...: try_logged, and again where the index could not be reached, or not in time.
pip_attempts() {
  local name="$1" attempt status=0 cause
  shift
  for ((attempt = 1; attempt <= PIP_ATTEMPTS; ++attempt)); do
    status=0
    try_logged "$name" timeout -k 10 "$PIP_ATTEMPT_SECONDS" "$@" || status=$?
    if [ "$status" -eq 0 ]; then return 0; fi
    if [ "$status" -eq 124 ]; then say "$TOOK_TOO_LONG after $PIP_ATTEMPT_SECONDS s" >>"$COHORT_LOGS/$name.log"; fi
    cause=$(explain "$COHORT_LOGS/$name.log")
    case "$cause" in "$NO_NETWORK" | "$SLOW_NETWORK") ;; *) return "$status" ;; esac
    if [ "$attempt" -lt "$PIP_ATTEMPTS" ]; then
      say "pip failed, because $cause: attempt $((attempt + 1)) of $PIP_ATTEMPTS in $PIP_PAUSE_SECONDS s" >&2
      sleep "$PIP_PAUSE_SECONDS"
    fi
  done
  return "$status"
}

# pip_quietly NAME FOLDER ARGUMENT...: pip in the environment FOLDER. Does not stop; the caller decides.
pip_quietly() {
  local name="$1" folder="$2"
  shift 2
  pip_attempts "$name" "$folder/bin/python" -m pip install -q --no-input --disable-pip-version-check "$@"
}

# pip_install NAME WHAT FOLDER ARGUMENT...: pip in the environment FOLDER; on a terminal its progress is shown.
pip_install() {
  local name="$1" what="$2" folder="$3" log="$COHORT_LOGS/$1.log" cause
  shift 3
  stop_if_no_install "Python packages in ${folder#"$COHORT_ROOT"/}"
  if [ -t 1 ] && [ -z "${COHORT_VERBOSE:-}" ] &&
    "$folder/bin/python" -m pip install --no-input --disable-pip-version-check "$@" 2>"$log" </dev/null; then
    return 0
  fi
  if pip_quietly "$name" "$folder" "$@"; then return 0; fi  # after a failure on a terminal too: it may be the network's
  tail -n 15 "$log" >&2
  cause=$(explain "$log")
  fail "$what failed${cause:+: $cause} (log: $log)."
}
