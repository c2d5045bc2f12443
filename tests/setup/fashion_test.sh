#!/usr/bin/env bash
# Which run ./quickstart evaluates: the one that it made. Usage: fashion_test.sh SOURCE LIBTORCH
set -euo pipefail
source_root="$1"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
mkdir -p "$SCRATCH/clone/.cohort/logs"

# A program that trains nothing, but says where as cohort does: in the last run.dir; a --fast-dev-run that is to
# resume works in a folder of its own.
cat >"$SCRATCH/cohort" <<'PROGRAM'
#!/usr/bin/env bash
command="$1" run="" tiny="" resume=""
shift
while [ $# -gt 0 ]; do
  case "$1" in
    run.dir=*) run="${1#run.dir=}" ;;
    run.resume=*) resume=1 ;;
    --fast-dev-run) tiny=1 ;;
    --run) run="$2" && shift ;;
    train.epochs=0) exit 3 ;;
  esac
  shift
done
case "$command" in
  train)
    if [ -n "$tiny" ] && [ -n "$resume" ]; then run=runs/dev; fi
    mkdir -p "$run/checkpoints/last" "$run/checkpoints/best"
    printf 'val_accuracy 0.5\ncheckpoint   %s/checkpoints/last\nbest         %s/checkpoints/best\n' "$run" "$run"
    ;;
  eval)
    [ -d "$run/checkpoints/best" ] || exit 2
    printf 'accuracy 0.75\nevaluated %s\n' "$run"
    ;;
esac
PROGRAM
chmod +x "$SCRATCH/cohort"

# quick TINY SETTING...
quick() {
  (
    cd "$SCRATCH/clone"
    export COHORT_ROOT="$PWD" COHORT_COMMAND=./quickstart
    # shellcheck source=scripts/lib/common.sh
    . "$source_root/scripts/lib/common.sh"
    # shellcheck source=scripts/lib/fashion.sh
    . "$source_root/scripts/lib/fashion.sh"
    train_and_report "$SCRATCH/cohort" "$@"
  )
}
expect "a run of its own is evaluated" 0 "evaluated runs/fashion-vgg-20" quick "" train.epochs=1
expect "a run in another folder is evaluated" 0 "evaluated my runs/one" quick "" "run.dir=my runs/one"
expect "the report names it" 0 "curves my runs/one/curves.svg" quick "" "run.dir=my runs/one"
expect "the last of two folders is" 0 "evaluated two" quick "" run.dir=one run.dir=two
mkdir -p "$SCRATCH/clone/old/checkpoints/best"
expect "a folder that the program did not take is not" 0 "evaluated runs/dev" quick 1 run.dir=old run.resume=auto
expect "training that fails says its status" 1 "training stopped (status 3)" quick "" train.epochs=0
finish
