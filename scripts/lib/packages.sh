# shellcheck shell=bash
# System packages: what is missing, and the three ways to get it (root, sudo, unpacked privately).

# Libraries to build against; docs/reference/dependencies.md says what each is for.
BUILD_PACKAGES=(libspdlog-dev libyaml-cpp-dev nlohmann-json3-dev libcli11-dev libjpeg-dev libpng-dev zlib1g-dev
  libxxhash-dev libarchive-dev libssl-dev libasio-dev)
TEST_PACKAGES=(libgtest-dev iproute2 libcurl4-openssl-dev)
# Open MPI looks for its parts where it was installed, so unpacking it privately is of no use.
INSTALLED_TEST_PACKAGES=(libopenmpi-dev openmpi-bin)
# Programs that tests start. To install these packages would start a service on this machine, so they are unpacked.
UNPACKED_TEST_PACKAGES=(etcd-server)
COHORT_SYSROOT="$COHORT_STATE/sysroot"
COHORT_TEST_PROGRAMS="$COHORT_STATE/programs"  # tests/support/net/etcd.h looks here
CMAKE_AT_LEAST=3.22

# For apt-get: a mirror that answers nothing for 30 s, or breaks off, is asked again, three times.
APT_PATIENCE=(-o Acquire::Retries=3 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)

# package_here NAME: installed in the system, or unpacked privately by an earlier run.
package_here() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ] ||
    grep -qxF "$1" "$COHORT_SYSROOT/.packages" 2>/dev/null
}

missing_packages() {
  local name
  for name in "$@"; do
    if ! package_here "$name"; then say "$name"; fi
  done
}

can_sudo() {
  command -v sudo >/dev/null || return 1
  if sudo -n true 2>/dev/null; then return 0; fi
  # A password may be asked for on a terminal, but only of someone who can have the right.
  [ -t 0 ] && id -nG | grep -qwE 'sudo|admin|wheel'
}

# How packages get here: root, sudo or private.
install_mode() {
  if [ -n "${COHORT_PRIVATE:-}" ]; then
    say private
  elif [ "$(id -u)" -eq 0 ]; then
    say root
  elif can_sudo; then
    say sudo
  else
    say private
  fi
}

# apt_private ARGUMENT...: apt-get with lists and caches of our own, which no right is needed for.
apt_private() {
  apt-get "${APT_PATIENCE[@]}" -o "Dir::State::Lists=$COHORT_STATE/apt/lists" -o "Dir::Cache=$COHORT_STATE/apt/cache" \
    -o Dir::State::status=/var/lib/dpkg/status -o Debug::NoLocking=1 -o "APT::Sandbox::User=" "$@"
}

# download_size COMMAND...: megabytes that `apt-get install` of what follows would fetch, or nothing.
download_size() {
  local what="$1"
  shift
  { "$what" install --print-uris -y --no-install-recommends "$@" 2>/dev/null || true; } |
    awk '/^\x27/ {bytes += $3} END {if (bytes > 0) printf "%.0f MB", bytes / 1e6 + 0.5}'
}

# fail_packages LOG-NAME NAME...
fail_packages() {
  local log="$COHORT_LOGS/$1.log" cause
  shift
  tail -n 15 "$log" >&2
  cause=$(explain "$log")
  # apt-get update does not fail without a network; that packages are unknown is then the consequence.
  if [ -z "$cause" ] && [ -f "$COHORT_LOGS/apt-update.log" ]; then cause=$(explain "$COHORT_LOGS/apt-update.log"); fi
  fail "these packages cannot be had: $*${cause:+, because $cause}; install them by hand and run again (log: $log)."
}

install_with_apt() {
  local prefix=() size
  if [ "$1" = sudo ]; then prefix=(sudo); fi
  shift
  if [ -n "${prefix[*]:-}" ] && ! sudo -v; then
    fail "sudo was rejected: install these packages as an administrator, or run again with --private: $*"
  fi
  size=$(download_size apt-get "$@")
  if [ -z "$size" ]; then
    # No lists yet, as in a container that is new.
    try_logged apt-update "${prefix[@]}" apt-get "${APT_PATIENCE[@]}" update || true
    size=$(download_size apt-get "$@")
  fi
  say "Installing with ${prefix[*]:+sudo }apt-get${size:+ ($size to download)}: $*"
  local install=("${prefix[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "${APT_PATIENCE[@]}" install -y --no-install-recommends "$@")
  if try_logged apt "${install[@]}"; then return 0; fi
  # Lists that are old: bring them up to date once, then try again.
  try_logged apt-update "${prefix[@]}" apt-get "${APT_PATIENCE[@]}" update || true
  try_logged apt "${install[@]}" || fail_packages apt "$@"
}

# fix_links FOLDER: absolute links of unpacked packages point into the system; point them into the folder where it has
# the file. `find -L -xtype l`-free on purpose: some links are meant to leave the folder.
fix_links() {
  local link target
  find "$1" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
    target=$(readlink "$link")
    if [ -e "$1$target" ]; then
      ln -sfn "$1$target" "$link"
    elif [ -e "$1/usr$target" ]; then
      ln -sfn "$1/usr$target" "$link"
    fi
  done
}

# Why packages are unpacked into .cohort/ and not installed.
why_private() {
  if [ -n "${COHORT_PRIVATE:-}" ]; then
    say "Nothing needs to be installed into the system for this"
  else
    say "Not root and no sudo"
  fi
}

install_privately() {
  local debs="$COHORT_STATE/apt/debs" plan size name deb
  command -v dpkg-deb >/dev/null || fail "dpkg-deb is missing, so packages cannot be unpacked privately: $*"
  mkdir -p "$COHORT_STATE/apt/lists/partial" "$COHORT_STATE/apt/cache/archives/partial" "$debs" "$COHORT_SYSROOT"
  if ! try_logged apt-plan apt_private -s install --no-install-recommends "$@"; then
    say "$(why_private): fetching the package lists into .cohort/ (about 10 MB)"
    try_logged apt-update apt_private update || true
    try_logged apt-plan apt_private -s install --no-install-recommends "$@" || fail_packages apt-plan "$@"
  fi
  # "Inst NAME (VERSION ..." or, for an upgrade, "Inst NAME [OLD] (VERSION ...".
  plan=$(awk '$1 == "Inst" {match($0, /\([^ ]+/); print $2 "=" substr($0, RSTART + 1, RLENGTH - 1)}' \
    "$COHORT_LOGS/apt-plan.log")
  size=$(download_size apt_private "$@")
  say "$(why_private): unpacking into .cohort/sysroot, nothing outside this folder changes" \
    "(${size:-size unknown}): $*"
  need_space 400 "unpacking these packages"
  if [ -n "$plan" ]; then
    local -a wanted
    mapfile -t wanted <<<"$plan"
    if ! (cd "$debs" && try_logged apt-download apt_private download "${wanted[@]}"); then
      # The lists are older than the mirror: bring them up to date once.
      try_logged apt-update apt_private update || fail_packages apt-update "$@"
      try_logged apt-plan apt_private -s install --no-install-recommends "$@" || fail_packages apt-plan "$@"
      mapfile -t wanted < <(awk '$1 == "Inst" {match($0, /\([^ ]+/); print $2 "=" substr($0, RSTART + 1, RLENGTH - 1)}' \
        "$COHORT_LOGS/apt-plan.log")
      (cd "$debs" && try_logged apt-download apt_private download "${wanted[@]}") || fail_packages apt-download "$@"
    fi
    for deb in "$debs"/*.deb; do
      run_logged dpkg "unpacking $(basename "$deb")" dpkg-deb -x "$deb" "$COHORT_SYSROOT"
    done
    fix_links "$COHORT_SYSROOT"
  fi
  for name in "$@"; do say "$name"; done >>"$COHORT_SYSROOT/.packages"
  rm -rf "$debs"
}

# ensure_packages WHY NAME...
ensure_packages() {
  local why="$1" mode
  shift
  local -a missing
  mapfile -t missing < <(missing_packages "$@")
  if [ "${#missing[@]}" -eq 0 ]; then return 0; fi
  say "Missing $why: ${missing[*]}"
  if [ -n "${COHORT_NO_INSTALL:-}" ]; then
    fail "--no-install was given, so install them yourself: apt-get install ${missing[*]}"
  fi
  mode=$(install_mode)
  if [ "$mode" = private ]; then install_privately "${missing[@]}"; else install_with_apt "$mode" "${missing[@]}"; fi
}

# unpack_programs NAME...: into .cohort/programs, without what the packages depend on.
unpack_programs() {
  local debs="$COHORT_STATE/apt/programs" deb size
  mkdir -p "$debs" "$COHORT_TEST_PROGRAMS" "$COHORT_STATE/apt/lists/partial" "$COHORT_STATE/apt/cache/archives/partial"
  size=$(download_size apt-get "$@")
  say "Unpacking into .cohort/programs${size:+ ($size to download)}: $*"
  # The system's package lists may be old or missing; only root can renew those, so lists of our own follow.
  if ! (cd "$debs" && try_logged apt-programs apt-get "${APT_PATIENCE[@]}" download "$@"); then
    try_logged apt-update apt_private update || true
    (cd "$debs" && try_logged apt-programs apt_private download "$@") || fail_packages apt-programs "$@"
  fi
  for deb in "$debs"/*.deb; do
    run_logged dpkg "unpacking $(basename "$deb")" dpkg-deb -x "$deb" "$COHORT_TEST_PROGRAMS"
  done
  rm -rf "$debs"
}

# ensure_programs NAME...: those of UNPACKED_TEST_PACKAGES that are not here.
ensure_programs() {
  local name
  local -a missing=()
  for name in "$@"; do
    if ! stamp_holds "program-$name" unpacked && ! package_here "$name"; then missing+=("$name"); fi
  done
  if [ "${#missing[@]}" -eq 0 ]; then return 0; fi
  stop_if_no_install "${missing[*]}"
  unpack_programs "${missing[@]}"
  for name in "${missing[@]}"; do set_stamp "program-$name" unpacked; done
}

# ensure_libraries build|test: the libraries to build against. Elsewhere than on Debian and Ubuntu they are expected there.
ensure_libraries() {
  local -a wanted=("${BUILD_PACKAGES[@]}")
  if [ "$1" = test ]; then wanted+=("${TEST_PACKAGES[@]}"); fi
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "This is no Debian or Ubuntu (no apt-get): the libraries in docs/reference/dependencies.md must be installed already."
    return 0
  fi
  if [ "$1" = test ]; then
    if [ "$(install_mode)" != private ]; then
      wanted+=("${INSTALLED_TEST_PACKAGES[@]}")
    elif [ -n "$(missing_packages "${INSTALLED_TEST_PACKAGES[@]}")" ]; then
      say "Left out, for it works only where root has installed it: ${INSTALLED_TEST_PACKAGES[*]}" \
        "(backend mpi is not built, and its tests are not there)."
    fi
  fi
  ensure_packages "to build with" "${wanted[@]}"
  if [ "$1" = test ]; then ensure_programs "${UNPACKED_TEST_PACKAGES[@]}"; fi
}

# can_install NAME...: apt-get knows these packages, and would remove nothing for them.
can_install() { apt-get -s install --no-remove --no-install-recommends "$@" >/dev/null 2>&1; }

# find_test_clang: sets `clang_packages` to the packages of a clang and its sanitizers, or of a clang alone, or to nothing.
find_test_clang() {
  local name
  for name in "${TEST_CLANGS[@]}"; do
    clang_packages=("$name" "lib${name/clang/clang-rt}-dev")
    if can_install "${clang_packages[@]}"; then return 0; fi
    clang_packages=("$name")
    if can_install "$name"; then return 0; fi
  done
  clang_packages=()
}

# ensure_test_clang: clang compiles the tests in half of g++'s time (cmake/compile.sh), and what runs under sanitizers.
# Where it cannot be had within three minutes g++ compiles them, and the next try is on another day.
ensure_test_clang() {
  if [ -n "$(test_clang)" ] || [ -n "${CXX:-}${COHORT_NO_INSTALL:-}" ] || ! command -v apt-get >/dev/null; then return 0; fi
  if stamp_holds no-test-clang "$(date +%F)"; then return 0; fi
  local -a as_root=() clang_packages=()
  case "$(install_mode)" in
    private) return 0 ;;
    sudo)
      as_root=(sudo)
      sudo -v || return 0
      ;;
  esac
  find_test_clang
  if [ "${#clang_packages[@]}" -eq 0 ] && try_logged apt-update "${as_root[@]}" timeout -k 10 60 apt-get update; then
    find_test_clang  # the lists were empty, or old
  fi
  if [ "${#clang_packages[@]}" -gt 0 ]; then
    say "Installing ${clang_packages[*]} ($(download_size apt-get "${clang_packages[@]}") to download): compiles the tests in half of g++'s time"
    if try_logged clang-install "${as_root[@]}" timeout -k 10 180 env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-remove --no-install-recommends --download-only "${clang_packages[@]}" &&
      try_logged clang-install "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-remove --no-install-recommends "${clang_packages[@]}"; then
      return 0
    fi
  fi
  say "No clang 16 to 19 can be had here: g++ compiles the tests, in twice the time."
  set_stamp no-test-clang "$(date +%F)"
}

# ensure_compiler: C++20 needs GCC 11 or clang 14.
ensure_compiler() {
  local compiler="${CXX:-}" version
  if [ -z "$compiler" ]; then
    if ! command -v c++ >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
      if command -v apt-get >/dev/null && [ "$(install_mode)" != private ]; then
        ensure_packages "to compile with" g++
      else
        fail "there is no C++ compiler, and without root or sudo none can be installed: ask for the package g++ (12 or newer)."
      fi
    fi
    compiler=$(command -v c++ || command -v g++ || command -v clang++)
  fi
  if ! printf '#if (defined(__clang__) && __clang_major__ < 14) || (!defined(__clang__) && __GNUC__ < 11)\n#error\n#endif\n#include <vector>\n' |
    "$compiler" -std=c++20 -x c++ -fsyntax-only - 2>"$COHORT_LOGS/compiler.log"; then
    version=$("$compiler" -dumpfullversion -dumpversion 2>/dev/null || say unknown)
    fail "the C++ compiler $compiler (version $version) cannot build C++20: install g++ 12 or newer, or name another with CXX=..."
  fi
  case "$compiler" in
    *clang*) export CC="${CC:-clang}" CXX="$compiler" ;;
    *) if ! command -v cc >/dev/null && [ -z "${CC:-}" ]; then export CC=gcc CXX="$compiler"; fi ;;
  esac
}

cmake_fits() {
  local version
  version=$("$1" --version 2>/dev/null | awk 'NR == 1 {print $3}')
  [ -n "$version" ] && version_at_least "$version" "$CMAKE_AT_LEAST"
}

# ensure_build_tools: CMake and Ninja from the system, from apt, or from pip in .cohort/venv.
ensure_build_tools() {
  if [ -x "$COHORT_STATE/venv/bin/cmake" ]; then PATH="$COHORT_STATE/venv/bin:$PATH"; fi
  local -a wanted=()
  if ! command -v cmake >/dev/null; then wanted+=(cmake); fi
  if ! command -v ninja >/dev/null; then wanted+=(ninja-build); fi
  if [ "${#wanted[@]}" -gt 0 ] && command -v apt-get >/dev/null && [ "$(install_mode)" != private ]; then
    ensure_packages "to build with" "${wanted[@]}"
    hash -r
  fi
  wanted=()
  if ! cmake_fits cmake; then wanted+=("cmake>=$CMAKE_AT_LEAST,<5"); fi
  if ! command -v ninja >/dev/null; then wanted+=(ninja); fi
  if [ "${#wanted[@]}" -gt 0 ]; then
    stop_if_no_install "${wanted[*]%%[<>=]*} (CMake $CMAKE_AT_LEAST or newer, Ninja)"
    say "Installing into .cohort/venv with pip (about 30 MB): ${wanted[*]%%[<>=]*}" \
      "(the system's is missing or older than CMake $CMAKE_AT_LEAST, and only root may install packages)"
    ensure_venv "$COHORT_STATE/venv"
    pip_install pip-tools "installing CMake and Ninja with pip" "$COHORT_STATE/venv" "${wanted[@]}"
    PATH="$COHORT_STATE/venv/bin:$PATH"
    hash -r
  fi
  export PATH
}

# use_sysroot: lets compiler, linker, CMake and pkg-config see what was unpacked privately.
use_sysroot() {
  if [ ! -d "$COHORT_SYSROOT/usr" ]; then return 0; fi
  local triplet lib python
  triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || gcc -print-multiarch 2>/dev/null || say "$(uname -m)-linux-gnu")
  lib="$COHORT_SYSROOT/usr/lib/$triplet:$COHORT_SYSROOT/lib/$triplet"
  export CMAKE_PREFIX_PATH="$COHORT_SYSROOT/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"
  export CPATH="$COHORT_SYSROOT/usr/include:$COHORT_SYSROOT/usr/include/$triplet${CPATH:+:$CPATH}"
  for python in "$COHORT_SYSROOT"/usr/include/python3.*; do
    if [ -f "$python/Python.h" ]; then CPATH="$CPATH:$python"; fi
  done
  export LIBRARY_PATH="$lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
  export LD_LIBRARY_PATH="$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  export PKG_CONFIG_PATH="$COHORT_SYSROOT/usr/lib/$triplet/pkgconfig:$COHORT_SYSROOT/usr/share/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}"
  # For the programs that are built: they run without these variables too (old-style run path, so that it serves the
  # libraries of libraries).
  local flag="-Wl,--disable-new-dtags"
  COHORT_SYSROOT_ARGUMENTS=("-DCMAKE_BUILD_RPATH=${lib/:/;}" "-DCOHORT_EXTRA_RPATH=${lib/:/;}"
    "-DCMAKE_EXE_LINKER_FLAGS=$flag" "-DCMAKE_SHARED_LINKER_FLAGS=$flag")
}
# shellcheck disable=SC2034 # read by build.sh
COHORT_SYSROOT_ARGUMENTS=()
