#!/usr/bin/env bash
# Each header that is installed compiles as the first of a source: as many as half a minute takes, at least one, and what is left
# comes with the next run. The first run in a build folder begins with the headers without LibTorch, and takes each kind in a
# random order, so that runs of CI try different ones. Later runs begin with the headers that were changed last. A header that
# has passed is not compiled again while its text, and what the headers that it includes include, stays. All of them take more
# than ten minutes of a core, which scripts/check_install --headers spends.
# Usage: headers_test.sh SOURCE LIBTORCH COMPILER STAMPS [SECONDS]
set -euo pipefail
source_root="$1" libtorch="$2" compiler="$3" stamps="$4" most="${5:-30}"
cd "$source_root"
is_first=""
if [ ! -d "$stamps" ]; then is_first=1; fi
mkdir -p "$stamps"
headers=$(mktemp) keys=$(mktemp -d) errors=$(mktemp)
trap 'rm -rf "$headers" "$keys" "$errors"' EXIT

# public_headers FORMAT: in a random order.
public_headers() { find cohort -name '*.h' -not -path '*/internal/*' -not -path '*/declarations/*' -printf "$1" | shuf; }
public_headers '%p\n' >"$headers"
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
      name = header; gsub("/", ",", name)
      printf "%s", key >(keys "/" name)
      close(keys "/" name)
    }
  }'

# in_order: "RANK HEADER" of each, in the order in which they are compiled.
in_order() {
  if [ -z "$is_first" ]; then
    # By the minute of the last change; those of one minute, as after a checkout, in a random order.
    public_headers '%TY%Tm%Td%TH%TM %p\n' | sort -s -r -k1,1
    return
  fi
  while IFS= read -r header; do
    printf '%s %s\n' "$(grep -cm 1 -E '#include <(ATen|c10|torch)/' "$keys/${header//\//,}")" "$header"
  done <"$headers" | sort -s -k1,1
}

compiled=0 failed=0 left=0 known=0
while read -r _ header; do
  name="${header//\//,}"
  if cmp -s "$keys/$name" "$stamps/$name"; then
    known=$((known + 1))
  elif [ "$compiled" -gt 0 ] && [ "$SECONDS" -ge "$most" ]; then
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
done < <(in_order)
printf '%s headers compiled, %s of them failed, %s have not changed since they passed, %s left for the next run\n' \
  "$compiled" "$failed" "$known" "$left"
[ "$failed" -eq 0 ] && [ $((compiled + known)) -gt 0 ]
