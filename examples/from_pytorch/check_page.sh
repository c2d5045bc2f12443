#!/usr/bin/env bash
# check_page.sh PAGE EXAMPLES: fails where a C++ block of PAGE is not in a source of EXAMPLES, line by line,
# whatever its indentation.
set -euo pipefail
page=$1
mapfile -t sources < <(find "$2" -name '*.cpp' | sort)
awk '
  function trimmed(line) { gsub(/^[ \t]+|[ \t]+$/, "", line); return line }
  FILENAME != page { if (trimmed($0) != "") sources = sources trimmed($0) "\n"; next }
  /^```cpp/ { inside = 1; block = ""; begin = FNR; next }
  /^```/ && inside {
    inside = 0
    blocks++
    if (index(sources, block) == 0) { print page ":" begin ": this block is in no example"; bad = 1 }
    next
  }
  inside && trimmed($0) != "" { block = block trimmed($0) "\n" }
  END {
    if (blocks < 8) { print "only " blocks " blocks were found"; bad = 1 }
    if (!bad) print blocks " blocks, all in the examples"
    exit bad
  }
' page="$page" "${sources[@]}" "$page"
