# shellcheck shell=bash
# Shared by quickstart, test, .ci/run and scripts/*: words, failures, stamps, limits of the machine.
# The caller sets COHORT_COMMAND (its own name) and COHORT_ROOT (the clone) before it reads this file.

: "${COHORT_COMMAND:?}" "${COHORT_ROOT:?}"
COHORT_STATE="$COHORT_ROOT/.cohort"
COHORT_LOGS="$COHORT_STATE/logs"

# say LINE...: one line for the person who waits.
say() { printf '%s\n' "$*"; }

# step TITLE: what happens now.
step() { printf '\n== %s\n' "$*"; }

# fail SENTENCE: the end of the command, in one sentence.
fail() {
  printf '\n%s: %s\n' "$COHORT_COMMAND" "$*" >&2
  exit 1
}

# test_slots: what ctest's -j is given. A test that computes takes three, one that waits two, one that sleeps one: two that sleep
# run beside those that compute.
test_slots() { say $((3 * $(usable_cores) + 2)); }

# stop_if_no_install WHAT: ends the command when it may install nothing, and says that WHAT is missing.
stop_if_no_install() {
  if [ -n "${COHORT_NO_INSTALL:-}" ]; then fail "--no-install was given, and this is missing: $1"; fi
}

make_state_folder() {
  if ! mkdir -p "$COHORT_LOGS" 2>/dev/null; then
    fail "cannot write to $COHORT_STATE: clone the project into a folder that you may write to."
  fi
}

# hash_of FILE_OR_WORD...: one short hash of the files' contents and of the words that are not files.
hash_of() {
  local item
  for item in "$@"; do
    if [ -f "$item" ]; then cat "$item"; else printf '%s\n' "$item"; fi
  done | sha256sum | cut -c1-16
}

# stamp_holds NAME VALUE: whether the work marked NAME was done with exactly this VALUE.
stamp_holds() { [ "$(cat "$COHORT_STATE/$1.stamp" 2>/dev/null)" = "$2" ]; }
set_stamp() { printf '%s\n' "$2" >"$COHORT_STATE/$1.stamp"; }

# need_space MEGABYTES WHAT: stops before a download or build that cannot end well.
need_space() {
  local free
  free=$(df -Pm "$COHORT_ROOT" | awk 'NR == 2 {print $4}')
  if [ "${free:-0}" -lt "$1" ]; then
    fail "the disk that holds $COHORT_ROOT has $free MB free, but $2 needs about $1 MB: make room and run again."
  fi
}

# What explain says of a network, and what it looks for where an attempt was ended.
NO_NETWORK="the network (or the package index) cannot be reached"
SLOW_NETWORK="the package index answers too slowly, or its connection breaks"
# shellcheck disable=SC2034 # read by python.sh
TOOK_TOO_LONG="was ended"

# explain LOG: the usual causes, told from what the failed command printed. Lines of source that a compiler quotes say nothing.
explain() {
  local text
  text=$(grep -vE '^ *[0-9]* *[|] ' "$1") || true
  if grep -qiE 'no space left on device|disk quota exceeded' <<<"$text"; then
    say "the disk is full"
  elif grep -qiE "readtimeout|read timed out|timed out \\(read|connection ?(reset|aborted|broken)|incompleteread|remote end closed|protocolerror|^error: wheel .* is invalid|do not match the hashes|^$TOOK_TOO_LONG after" <<<"$text"; then
    say "$SLOW_NETWORK"
  elif grep -qiE 'could not resolve|name resolution|network is unreachable|failed to establish|connection (refused|timed out)|failed to fetch|unable to connect|max retries|proxyerror|newconnectionerror|connecttimeouterror' <<<"$text"; then
    say "$NO_NETWORK"
  elif grep -qiE 'no matching distribution|could not find a version' <<<"$text"; then
    say "the package index has no build for this Python and machine ($(uname -m))"
  elif grep -qiE 'killed (signal|terminated program)|out of memory|bad_alloc|virtual memory exhausted' <<<"$text"; then
    say "memory ran out (try --jobs 1)"
  elif grep -qiE 'dpkg was interrupted|could not get lock|unable to acquire the dpkg' <<<"$text"; then
    say "another apt or dpkg is running or was interrupted"
  elif grep -qiE 'permission denied|read-only file system' <<<"$text"; then
    say "permission was denied"
  fi
}

# run_logged NAME WHAT COMMAND...: runs quietly, keeps the output in a log; on failure shows its end and stops.
run_logged() {
  local name="$1" what="$2" log="$COHORT_LOGS/$1.log"
  shift 2
  if try_logged "$name" "$@"; then return 0; fi
  tail -n 25 "$log" >&2
  local cause
  cause=$(explain "$log")
  fail "$what failed${cause:+: $cause} (all of its output: $log)."
}

# try_logged NAME COMMAND...: the same without stopping; the caller decides.
try_logged() {
  local log="$COHORT_LOGS/$1.log"
  shift
  if [ -n "${COHORT_VERBOSE:-}" ]; then
    "$@" 2>&1 </dev/null | tee "$log"
    return "${PIPESTATUS[0]}"
  fi
  "$@" >"$log" 2>&1 </dev/null
}

# usable_cores: processors that this process may use, by affinity and by control-group quota.
usable_cores() {
  local cores quota period
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # nproc takes these for its answer
  if [ -r /sys/fs/cgroup/cpu.max ]; then
    read -r quota period </sys/fs/cgroup/cpu.max
  elif [ -r /sys/fs/cgroup/cpu/cpu.cfs_quota_us ]; then
    quota=$(cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us)
    period=$(cat /sys/fs/cgroup/cpu/cpu.cfs_period_us)
  fi
  case "${quota:-max}" in
    max | -1) ;;
    *)
      quota=$(((quota + period - 1) / period))
      if [ "$quota" -ge 1 ] && [ "$quota" -lt "$cores" ]; then cores=$quota; fi
      ;;
  esac
  say "$cores"
}

# build_jobs: as many compilers as cores and memory allow (one that reads LibTorch's headers takes up to 1.3 GB).
build_jobs() {
  local cores memory
  cores=$(usable_cores)
  memory=$(awk '/^MemAvailable:/ {print int($2 / 1400000)}' /proc/meminfo)
  if [ "${memory:-1}" -lt "$cores" ]; then cores=${memory:-1}; fi
  if [ "$cores" -lt 1 ]; then cores=1; fi
  say "$cores"
}

# version_at_least HAVE WANT
version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# elapsed SECONDS: 75 -> 1 min 15 s
elapsed() {
  if [ "$1" -ge 60 ]; then say "$(($1 / 60)) min $(($1 % 60)) s"; else say "$1 s"; fi
}
