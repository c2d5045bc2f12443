#!/bin/sh
# ccache.sh CCACHE COMPILER ARGUMENT...: compiles through ccache. For each source it would hash the precompiled header that the
# source takes, 400 to 700 MB; here that is done once, when the header is made.
set -eu
header=""
for argument in "$@"; do
  case "$argument" in *.gch) header="$argument" ;; esac
done
CCACHE_PCH_EXTSUM=1 "$@"
if [ -n "$header" ]; then sha256sum <"$header" >"$header.sum"; fi
