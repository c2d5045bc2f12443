#!/usr/bin/env bash
# What pip_install of scripts/lib/python.sh and apt-get do where the package index is slow, or breaks connections off: a stub of it on
# the loopback (package_index.py). Usage: package_index_test.sh SOURCE LIBTORCH
set -euo pipefail
source_root="$1"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
python="${COHORT_PYTHON:?is not set: a Python 3 with pip (./test sets it)}"
mkdir -p "$SCRATCH/clone/.cohort/logs" "$SCRATCH/venv/bin"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" >"$SCRATCH/venv/bin/python"
chmod +x "$SCRATCH/venv/bin/python"

# with_index WHAT TEXT: functions of scripts/lib, with that index at $index. pip's attempts have no pause, and a request of
# its has 0.3 s.
with_index() {
  local port="$SCRATCH/port"
  rm -rf "$port" "$SCRATCH/site"
  mkfifo "$SCRATCH/open"
  "$python" "$source_root/tests/setup/package_index.py" "$1" "$port" <"$SCRATCH/open" &
  exec 9>"$SCRATCH/open"  # closed at the end of this, it ends the index
  rm "$SCRATCH/open"
  for _ in $(seq 100); do
    if [ -s "$port" ]; then break; fi
    sleep 0.1
  done
  env -u PIP_EXTRA_INDEX_URL -u PIP_FIND_LINKS -u PIP_CERT -u http_proxy -u HTTP_PROXY -u PIP_PROXY NO_PROXY=127.0.0.1 PIP_CONFIG_FILE=/dev/null \
    PIP_DEFAULT_TIMEOUT=0.3 PIP_PAUSE_SECONDS=0 \
    COHORT_COMMAND=./quickstart COHORT_ROOT="$SCRATCH/clone" bash -c "set -euo pipefail
      . '$source_root/scripts/lib/common.sh'
      . '$source_root/scripts/lib/packages.sh'
      . '$source_root/scripts/lib/python.sh'
      index=http://127.0.0.1:$(cat "$port")
      $2" 9>&-
}
# install_from WHAT ATTEMPTS RETRIES: pip_install; pip itself makes a request once more as often as RETRIES says.
install_from() {
  with_index "$1" "export PIP_RETRIES=$3
    PIP_ATTEMPTS=$2
    pip_install pip-probe 'installing probe with pip' '$SCRATCH/venv' --no-cache-dir --target '$SCRATCH/site' \
      --index-url \$index/simple probe==1.0
    cat '$SCRATCH/site/probe.py'"
}
# lists_from WHAT: apt_private update.
lists_from() {
  rm -rf "$SCRATCH/clone/.cohort/apt"
  with_index "$1" "mkdir -p '$SCRATCH/clone/.cohort/apt/lists/partial' '$SCRATCH/clone/.cohort/apt/cache/archives/partial'
    printf 'deb [trusted=yes] %s ./\n' \$index >'$SCRATCH/sources.list'
    APT_PATIENCE+=(-o Acquire::Retries::Delay=false -o Acquire::http::Proxy::127.0.0.1=DIRECT
      -o 'Dir::Etc::SourceList=$SCRATCH/sources.list' -o Dir::Etc::SourceParts=-)
    apt_private update"
}
slow="the package index answers too slowly, or its connection breaks"
expect "an index that drops a connection, breaks a file off and answers late is asked again each time" 0 \
  "because $slow: attempt 2 of 4 in 0 s pip failed, because $slow: attempt 3 of 4 in 0 s pip failed, because $slow: attempt 4 of 4 in 0 s answer = 42" \
  install_from drop,cut,late 4 0
expect "an index that never answers is an error that says so" 1 "./quickstart: installing probe with pip failed: $slow (log: " \
  install_from silent 1 1
if command -v apt-get >/dev/null; then
  expect "a mirror that drops a connection is asked again" 0 "./ Packages [147 B]" lists_from drop
fi
finish
