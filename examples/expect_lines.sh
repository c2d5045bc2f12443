#!/usr/bin/env bash
# expect_lines.sh REGEX... -- COMMAND...: fails unless COMMAND succeeds and prints, in this order, a line for each
# extended regular expression.
set -euo pipefail
expected=()
while [[ $# -gt 0 && $1 != -- ]]; do
  expected+=("$1")
  shift
done
[[ $# -ge 2 && ${#expected[@]} -gt 0 ]] || { echo "usage: $0 REGEX... -- COMMAND..." >&2; exit 2; }
shift
status=0
output=$("$@") || status=$?
printf '%s\n' "$output"
[[ $status -eq 0 ]] || { echo "$1 ended with status $status" >&2; exit 1; }
next=0
while IFS= read -r line; do
  if [[ $next -lt ${#expected[@]} && $line =~ ${expected[next]} ]]; then next=$((next + 1)); fi
done <<<"$output"
[[ $next -eq ${#expected[@]} ]] || { echo "no line for: ${expected[next]}" >&2; exit 1; }
