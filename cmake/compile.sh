#!/bin/sh
# compile.sh [--through CCACHE] [--with CLANG] COMPILER ARGUMENT...: what CMake starts for each source.
# --with: CLANG compiles in place of COMPILER, which is GCC. GCC instantiates what the functions of a precompiled header
#   use once for each source, 4 s for the tests'; clang does it when it makes the header.
# --through: compiles through ccache, which would hash the precompiled header that a source takes, 100 to 500 MB, each
#   time. Here it is hashed once, by what it was made from: the bytes of the same header differ from folder to folder.
set -eu
ccache="" clang=""
while :; do
  case "$1" in
    --through) ccache="$2" ;;
    --with) clang="$2" ;;
    *) break ;;
  esac
  shift 2
done
compiler="$1" header="" list=""
shift
last=""
for argument in "$@"; do
  case "$argument" in *.gch) header="$argument" ;; esac
  if [ "$last" = -MF ]; then list="$argument"; fi
  last="$argument"
done
if [ -n "$clang" ]; then
  compiler="$clang"
  set -- -Wno-unknown-warning-option "$@"
  case "$clang" in *-19) ;; *) set -- "$@" -Wno-error ;; esac  # which warnings another one has is not known
  if [ -n "$header" ]; then set -- -Xclang -fpch-instantiate-templates -Xclang -fno-pch-timestamp "$@"; fi
fi
if [ -n "$header" ]; then rm -f "$header" "$header.sum"; fi  # of another compiler, it would be read
if [ -z "$ccache" ]; then exec "$compiler" "$@"; fi
if [ -n "$header" ] && [ -n "$clang" ]; then
  "$compiler" "$@"  # it holds the paths of its headers: from another folder's, clang reads each of them twice
else
  CCACHE_PCH_EXTSUM=1 "$ccache" "$compiler" "$@"
fi
if [ -z "$header" ] || [ ! -f "$list" ]; then exit 0; fi
# The files of the list: the first line begins with the target, and a space in a path is escaped. Where one is not found
# there is no sum, and ccache hashes the precompiled header itself.
files="$header.files"
sed '1s/^[^:]*: *//; s/ *\\$//' "$list" | sed 's/\\ /\x01/g' | tr ' ' '\n' | sed 's/\x01/ /g; s/\\#/#/g; s/\$\$/$/g' | grep . >"$files"
if { "$compiler" --version && printf '%s\n' "$@" | grep -E '^-[DUOfgmsW]|^-std' && tr '\n' '\0' <"$files" | xargs -0 cat; } >"$files.all"; then
  sha256sum <"$files.all" >"$header.sum"
fi
rm -f "$files" "$files.all"
