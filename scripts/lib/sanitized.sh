# shellcheck shell=bash
# Which programs of tests scripts/sanitize readers builds and runs: those that changed since all of them passed.

# What passed under all sanitizers, of which files: written by scripts/sanitize readers, and committed.
SANITIZED_RECORD="$COHORT_ROOT/scripts/sanitized.txt"

# changed_programs SOURCES RECORD ARGUMENT...: changed_programs.py of this clone.
changed_programs() {
  local sources="$1" record="$2" python
  shift 2
  for python in "${COHORT_PYTHON:-}" python3; do
    if [ -n "$python" ] && command -v "$python" >/dev/null; then
      "$python" "$COHORT_ROOT/scripts/lib/changed_programs.py" "$COHORT_ROOT" "$sources" "$record" "$@"
      return
    fi
  done
  say "There is no Python." >&2
  return 1
}

# choose_programs SOURCES: sets `changed` to the programs to run, and says which are left out, and why. Where it cannot be
# known, all are run.
choose_programs() {
  local sources="$1" verdicts
  local -a same
  changed=()
  if ! verdicts=$(changed_programs "$sources" "$SANITIZED_RECORD"); then
    say "What changed is not known, so every program of tests is run."
    mapfile -t changed < <(cut -f 1 "$sources" | sort -u)
    return 0
  fi
  mapfile -t changed < <(sed -n 's/^changed //p' <<<"$verdicts")
  mapfile -t same < <(sed -n 's/^same //p' <<<"$verdicts")
  if [ ! -f "$SANITIZED_RECORD" ]; then say "There is no ${SANITIZED_RECORD#"$COHORT_ROOT"/}, so every program of tests is run."; fi
  if [ "${#same[@]}" -gt 0 ]; then
    say "Left out, for none of the files that they are built from and read has changed since they passed under all sanitizers"
    say "(${SANITIZED_RECORD#"$COHORT_ROOT"/}): ${same[*]}"
  fi
  if [ "${#changed[@]}" -gt 0 ]; then say "Changed: ${changed[*]}"; else say "Nothing is left to run."; fi
}

# note_programs SOURCES: keeps the fingerprints of what is going to be tested, which may be edited meanwhile.
note_programs() {
  rm -f "$COHORT_STATE/sanitized.txt"
  changed_programs "$1" "$COHORT_STATE/sanitizing.txt" --write || rm -f "$COHORT_STATE/sanitizing.txt"
}

# record_programs: all that was noted passed, now or before. The record itself is a file of the project, which a check does
# not change.
record_programs() {
  if [ ! -f "$COHORT_STATE/sanitizing.txt" ]; then return 0; fi
  mv "$COHORT_STATE/sanitizing.txt" "$COHORT_STATE/sanitized.txt"
  if cmp -s "$COHORT_STATE/sanitized.txt" "$SANITIZED_RECORD"; then return 0; fi
  say "To have CI leave out what passed: cp .cohort/sanitized.txt ${SANITIZED_RECORD#"$COHORT_ROOT"/}, and commit it."
}

# ctest_names PROGRAM...: a regular expression of their tests' names.
ctest_names() {
  local program pattern=""
  for program in "$@"; do
    case "$program" in
      *_replay) pattern+="|^fuzz\\.${program%_replay}\$" ;;
      *) pattern+="|^${program%_test}\\." ;;
    esac
  done
  say "${pattern#|}"
}
