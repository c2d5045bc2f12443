#!/usr/bin/env bash
# Each header that is installed compiles as the first of a source: of those without LibTorch, and of those that have changed
# since the first run in this build folder, as many as a minute takes; those that were changed last come first, and what is
# left comes with the next run. A header that has passed is not compiled again while its text, and what the headers that it
# includes include, stays. All of them take more than ten minutes of a core, which scripts/check_install --headers spends.
# Usage: headers_test.sh SOURCE LIBTORCH COMPILER STAMPS [SECONDS]
set -euo pipefail
source_root="$1" libtorch="$2" compiler="$3" stamps="$4" most="${5:-60}"
cd "$source_root"
is_first=""
if [ ! -d "$stamps" ]; then is_first=1; fi
mkdir -p "$stamps"
headers=$(mktemp) keys=$(mktemp -d) errors=$(mktemp)
trap 'rm -rf "$headers" "$keys" "$errors"' EXIT

# By the minute of their last change; those of one minute, as after a checkout, in any order.
find cohort -name '*.h' -not -path '*/internal/*' -not -path '*/declarations/*' -printf '%TY%Tm%Td%TH%TM %p\n' |
  shuf | sort -s -r -k1,1 | cut -d' ' -f2 >"$headers"
version=$("$compiler" --version | sed -n 1p)

# A key for each: the compiler, LibTorch, its text, and the include lines of all that it includes from here.
# shellcheck disable=SC2016 # of awk
find cohort -name '*.h' -print0 | xargs -0 awk -v list="$headers" -v keys="$keys" -v version="$version $libtorch" '
  /^ *# *include/ {
    lines[FILENAME] = lines[FILENAME] $0 "\n"
    if (match($0, /"cohort\/[^"]+"/)) next_of[FILENAME] = next_of[FILENAME] " " substr($0, RSTART + 1, RLENGTH - 2)
  }
  {text[FILENAME] = text[FILENAME] $0 "\n"}
  END {
    while ((getline header <list) > 0) {
      split("", seen)
      count = 1; queue[1] = header; seen[header] = 1; key = version "\n" text[header]
      for (at = 1; at <= count; at++) {
        key = key lines[queue[at]]
        size = split(next_of[queue[at]], names, " ")
        for (i = 1; i <= size; i++) if (!(names[i] in seen)) { seen[names[i]] = 1; queue[++count] = names[i] }
      }
      name = header; gsub("/", "_", name)
      printf "%s", key >(keys "/" name)
      close(keys "/" name)
    }
  }'

compiled=0 failed=0 left=0 known=0
while IFS= read -r header; do
  name="${header//\//_}"
  if [ -n "$is_first" ] && grep -qE '#include <(ATen|c10|torch)/' "$keys/$name"; then mv "$keys/$name" "$stamps/$name"; fi
  if [ ! -f "$keys/$name" ] || cmp -s "$keys/$name" "$stamps/$name"; then
    known=$((known + 1))
  elif [ "$SECONDS" -ge "$most" ]; then
    left=$((left + 1))
  else
    compiled=$((compiled + 1))
    if printf '#include <%s>\n' "$header" | "$compiler" -std=c++20 -fsyntax-only -w -x c++ -I. -isystem "$libtorch/include" \
      -isystem "$libtorch/include/torch/csrc/api/include" -DUSE_DISTRIBUTED -DUSE_C10D_GLOO - 2>"$errors"; then
      mv "$keys/$name" "$stamps/$name"
    else
      failed=$((failed + 1))
      printf 'FAILED   %s does not compile as the first header of a source:\n' "$header"
      grep -m 3 -A 3 error: "$errors" || head -n 5 "$errors"
    fi
  fi
done <"$headers"
printf '%s headers compiled, %s failed, %s have not changed, %s left for the next run\n' "$compiled" "$failed" "$known" "$left"
[ "$failed" -eq 0 ] && [ $((compiled + known)) -gt 0 ]
