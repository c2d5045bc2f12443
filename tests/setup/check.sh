# shellcheck shell=bash
# A few words for tests in shell. The first failure is shown with the whole output and counts.
SCRATCH=$(mktemp -d "${TMPDIR:-/tmp}/cohort setup XXXXXX")
trap 'rm -rf "$SCRATCH"' EXIT
failures=0

# expect TITLE STATUS TEXT COMMAND...: the command ends with STATUS (or "any failure": !0) and its output holds TEXT.
expect() {
  local title="$1" want="$2" text="$3" status=0 output
  shift 3
  output=$("$@" 2>&1 </dev/null) || status=$?
  if { [ "$want" = '!0' ] && [ "$status" -ne 0 ]; } || [ "$want" = "$status" ]; then
    if [[ "$(tr -s '[:space:]' ' ' <<<"$output")" == *"$text"* ]]; then
      printf 'ok       %s\n' "$title"
      return 0
    fi
  fi
  printf 'FAILED   %s: status %s (expected %s), output (expected: %s):\n%s\n' "$title" "$status" "$want" "$text" "$output"
  failures=$((failures + 1))
}

finish() {
  if [ "$failures" -gt 0 ]; then
    printf '%s checks failed\n' "$failures"
    exit 1
  fi
}
