# shellcheck shell=bash
# The virtual environment of the tests: Python oracles and checkers, pinned in scripts/requirements-test*.txt.
COHORT_TEST_VENV="$COHORT_STATE/test-venv"

# torchvision_without_operators FILE: the index may have torchvision only with compiled operators for CUDA, which do not
# load beside a CPU torch; its import then stops at operators whose names are not known. Declare the names: the model
# definitions and transforms, all that the oracles use, need no compiled operator.
torchvision_without_operators() {
  if grep -q cohort_operators "$1"; then return 0; fi
  cat >>"$1" <<'PYTHON'

if not _has_ops():
    cohort_operators = torch.library.Library("torchvision", "DEF")
    for cohort_name in ("nms", "qnms"):
        cohort_operators.define(cohort_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
}

ensure_test_venv() {
  local requirements="$COHORT_ROOT/scripts/requirements-test.txt" stamp shared site version
  stamp=$(hash_of "$requirements" "$COHORT_ROOT/scripts/requirements-test-nodeps.txt" "$COHORT_ROOT")
  if stamp_holds test-venv "$stamp" && [ -x "$COHORT_TEST_VENV/bin/python" ]; then return 0; fi
  need_space 4000 "the tests' Python packages"
  find_python 3.11
  ensure_venv "$COHORT_TEST_VENV" 3.11
  # The wheel that ./quickstart fetched serves here too, where it is the same release for the same Python.
  shared=$(echo "$COHORT_STATE"/venv/lib/python3*/site-packages)
  site=$(echo "$COHORT_TEST_VENV"/lib/python3*/site-packages)
  rm -f "$site/cohort-shared.pth"
  if [ -d "$shared/torch" ] && [ "$(basename "$(dirname "$shared")")" = "$(basename "$(dirname "$site")")" ]; then
    version=$(libtorch_version "$shared/torch")
    if [ "$version" = "$LIBTORCH_WHEEL" ] && [ -z "$(missing_libraries "$shared/torch")" ] &&
      [ ! -f "$shared/torch/lib/libtorch_cuda.so" ]; then
      printf '%s\n' "$shared" >"$site/cohort-shared.pth"
    fi
  fi
  if [ -f "$site/cohort-shared.pth" ]; then
    say "Python oracles for the tests into .cohort/test-venv (about 80 MB to download; torch from .cohort/venv):"
  else
    say "Python oracles for the tests into .cohort/test-venv: about 280 MB to download, or several GB where the package"
    say "index has only the CUDA build of torch, whose Python part does not start without CUDA's packages:"
    # A CPU build first, for its size; where there is none, the next call fetches what there is.
    pip_quietly pip-torch-test "$COHORT_TEST_VENV" --no-deps "torch==$LIBTORCH_WHEEL+cpu" || true
  fi
  say "$(grep -v '^#' "$requirements" "$COHORT_ROOT/scripts/requirements-test-nodeps.txt" -h | tr '\n' ' ')"
  pip_install pip-test "installing the tests' Python packages with pip" "$COHORT_TEST_VENV" -r "$requirements"
  pip_install pip-test-nodeps "installing torchvision with pip" "$COHORT_TEST_VENV" \
    --no-deps -r "$COHORT_ROOT/scripts/requirements-test-nodeps.txt"
  torchvision_without_operators "$(echo "$COHORT_TEST_VENV"/lib/python3*/site-packages/torchvision/extension.py)"
  "$COHORT_TEST_VENV/bin/python" -W ignore -c 'import torch, torchvision, PIL, numpy, tensorboard, safetensors, yaml' \
    >"$COHORT_LOGS/oracles.log" 2>&1 ||
    fail "the tests' Python packages were installed but cannot be imported: $(tail -n 1 "$COHORT_LOGS/oracles.log")"
  set_stamp test-venv "$stamp"
}

# ensure_python_headers: Python.h of the test environment's Python, to compile the module that a test loads.
ensure_python_headers() {
  local folder version
  folder=$("$COHORT_TEST_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  version=$(basename "$folder")
  if [ -f "$folder/Python.h" ] || [ -f "$COHORT_SYSROOT/usr/include/$version/Python.h" ]; then return 0; fi
  if ! command -v apt-get >/dev/null; then
    say "$folder/Python.h is not here: install the headers of $version, or the tests that compile a Python module fail."
    return 0
  fi
  ensure_packages "to compile a Python module with" "lib$version-dev"
}

# ensure_test_libtorch [FOLDER]: one that was named, else that of the test environment, so that one wheel is enough and
# C++ and the oracles compute with the same library. Its folder is kept in .cohort/test-libtorch.path.
ensure_test_libtorch() {
  find_test_libtorch "${1:-}"
  printf '%s\n' "$COHORT_LIBTORCH" >"$COHORT_STATE/test-libtorch.path"
}
find_test_libtorch() {
  local folder
  if [ -n "$1" ]; then
    find_libtorch "$1"
    return 0
  fi
  folder=$(torch_of "$COHORT_TEST_VENV/bin/python")
  if libtorch_fits "$folder"; then
    COHORT_LIBTORCH=$(cd "$folder" && pwd -P)
    if [ ! -f "$COHORT_STATE/libtorch.path" ]; then printf '%s\n' "$COHORT_LIBTORCH" >"$COHORT_STATE/libtorch.path"; fi
    say "LibTorch $(libtorch_version "$folder") from the tests' own environment"
  else
    ensure_libtorch
  fi
}

# set_test_environment: what each test is run with.
set_test_environment() {
  export COHORT_PYTHON="$COHORT_TEST_VENV/bin/python" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
}

# failures_of LOG: the assertions that failed in the tests that ctest's log says failed, 100 lines at most.
failures_of() {
  awk '
    /^[0-9]+\/[0-9]+ Testing: / {lines = $0 "\n"; left = 0}
    /: Failure$|^\[  FAILED  \]|^FAILED |ended by signal|ERROR: / {left = 8}
    left > 0 {lines = lines "  " $0 "\n"; left--}
    /^Test Failed\.$|^Test time exceeded|^Test timeout/ {printf "%s", lines}' "$1" | head -n 100
}

# run_tests PRESET CTEST-OPTION...: all but those labelled slow, and shows the assertions that failed again, as the end of a
# long output is what is read. Tests that wait for deadlines ran beside others on one core, where a deadline may pass too
# early: where at most three failed, all of them such, they run once more, alone. Leaves ctest's log of the first time in
# FirstTest.log. Status: whether all passed.
run_tests() {
  local folder="$COHORT_ROOT/build/$1" results="$COHORT_ROOT/build/$1/Testing/Temporary" status=0
  shift
  rm -f "$results/LastTestsFailed.log"  # ctest leaves it as it was where it runs no test
  ctest --test-dir "$folder" -j "$(test_slots)" -LE slow --output-on-failure --no-tests=error "$@" || status=$?
  cp "$results/LastTest.log" "$results/FirstTest.log"
  if [ "$status" -eq 0 ]; then return 0; fi
  passes_alone "$folder"
}

# passes_alone FOLDER: of run_tests, after ctest failed.
passes_alone() {
  local folder="$1" log="$COHORT_LOGS/tests-alone.log" results="$1/Testing/Temporary" failed pattern all
  if [ ! -s "$results/LastTestsFailed.log" ]; then return 1; fi  # no test ran
  say
  say "What failed:"
  failures_of "$results/LastTest.log"
  failed=$(sed 's/^[0-9]*://' "$results/LastTestsFailed.log")
  all=$(sed -nE 's|^[0-9]+/([0-9]+) Testing: .*|\1|p' "$results/LastTest.log" | tail -n 1)
  if [ "$(wc -l <<<"$failed")" -gt 3 ] || grep -qvE -f "$folder/waiting_tests.txt" <<<"$failed"; then return 1; fi
  say "They wait for deadlines, and ran beside others. Once more, alone:"
  pattern="^($(paste -s -d '|' <<<"${failed//[^a-zA-Z0-9_$'\n']/.}"))\$"
  if ! ctest --test-dir "$folder" -R "$pattern" --no-tests=error --output-on-failure >"$log" 2>&1; then
    failures_of "$results/LastTest.log"
    return 1
  fi
  say "100% tests passed out of $all, these when they ran alone: $(paste -s -d ' ' <<<"$failed")"
}
