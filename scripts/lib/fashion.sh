# shellcheck shell=bash
# The quick job: Fashion-MNIST from Debian's package to JPEG files, training, evaluation, the closing report.

FASHION_PACKAGE=dataset-fashion-mnist
FASHION_FOLDER="$COHORT_ROOT/data/fashion-mnist"

find_program_cohort() {
  local program
  program=$(find "$COHORT_ROOT/build/$COHORT_PRESET" -maxdepth 2 -name cohort -type f -perm -u+x | head -n 1)
  [ -n "$program" ] || fail "the build made no program cohort in build/$COHORT_PRESET; remove that folder and run again."
  say "$program"
}

# fashion_source: the folder with the four IDX files, from the system or unpacked privately.
fashion_source() {
  local file
  for file in {,"$COHORT_SYSROOT"}/usr/share/{datasets/fashion-mnist,$FASHION_PACKAGE,datasets/*}/{,*/}train-images-idx3-ubyte*; do
    if [ -f "$file" ] && [[ "$file" == *fashion* ]]; then
      dirname "$file"
      return 0
    fi
  done
}

ensure_fashion() {
  local cohort="$1" source begun=$SECONDS
  if [ -f "$FASHION_FOLDER/.complete" ]; then
    say "data/fashion-mnist is there already."
    return 0
  fi
  source=$(fashion_source)
  if [ -z "$source" ]; then
    command -v apt-get >/dev/null ||
      fail "Fashion-MNIST comes from Debian's package $FASHION_PACKAGE and there is no apt-get here: turn the four IDX files into an image folder with: '$cohort' data fashion --source FOLDER --out data/fashion-mnist"
    # Only root may unpack it into the system; it is data, so without root it need not bother sudo.
    if [ "$(id -u)" -ne 0 ]; then
      COHORT_PRIVATE=1 ensure_packages "to train on" "$FASHION_PACKAGE"
    else
      ensure_packages "to train on" "$FASHION_PACKAGE"
    fi
    source=$(fashion_source)
    [ -n "$source" ] || fail "the package $FASHION_PACKAGE is installed, but its files are not where they were expected (dpkg -L $FASHION_PACKAGE)."
  fi
  need_space 500 "70,000 small files"
  rm -rf "$FASHION_FOLDER.part" "$FASHION_FOLDER"
  mkdir -p "$COHORT_ROOT/data"
  run_logged fashion "turning Fashion-MNIST into JPEG files" \
    "$cohort" data fashion --source "$source" --out "$FASHION_FOLDER.part"
  touch "$FASHION_FOLDER.part/.complete"
  mv "$FASHION_FOLDER.part" "$FASHION_FOLDER"
  say "data/fashion-mnist: $(find "$FASHION_FOLDER/train" -type f | wc -l) images to train, $(find "$FASHION_FOLDER/val" -type f | wc -l) to validate (in $(elapsed $((SECONDS - begun))))."
}

# train_and_report COHORT TINY SETTING...
train_and_report() {
  local cohort="$1" tiny="$2" run begun=$SECONDS accuracy log="$COHORT_LOGS/eval.log" report="$COHORT_LOGS/train.log"
  shift 2
  local -a train=("$cohort" train --config configs/fashion-vgg.yaml "data.path=data/fashion-mnist"
    "run.dir=runs/fashion-vgg-$(date -u +%Y%m%d-%H%M%S)")
  if [ -n "$tiny" ]; then train+=(--fast-dev-run); fi
  say "cohort ${train[*]:1} $*"
  # OpenMP's threads spin while they wait, for milliseconds; with a neighbour on one of the cores that costs three quarters of
  # the speed. Sleeping after some 40 us costs nothing on a quiet machine and less beside a neighbour (docs/measurements/performance.md).
  if [ -z "${OMP_WAIT_POLICY:-}" ]; then export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-3000}"; fi
  # At CTRL-C the program saves and says how to resume: tee stays until then.
  "${train[@]}" "$@" | tee -i "$report" || fail "training stopped (status ${PIPESTATUS[0]}); its messages stand above."
  local trained=$((SECONDS - begun))
  # Settings may have named another folder.
  run=$(sed -n 's,^checkpoint  *\(.*\)/checkpoints/last$,\1,p' "$report")
  [ -n "$run" ] || fail "training printed no checkpoint (its output: $report)."

  step "Evaluating the best checkpoint on the validation images"
  "$cohort" eval --run "$run" >"$log" || fail "the evaluation failed; its message stands above."
  cat "$log"
  accuracy=$(awk 'tolower($1) ~ /(accuracy|top1)$/ {print $2; exit}' "$log")
  [ -n "$accuracy" ] || fail "the evaluation printed no accuracy (its output: $log)."
  accuracy=$(awk -v a="$accuracy" 'BEGIN {printf "%.2f %%", (a <= 1 ? 100 * a : a)}')

  local program="${cohort#"$COHORT_ROOT"/}"
  cat <<REPORT

Accuracy on the validation images: $accuracy (trained in $(elapsed "$trained"))
  checkpoint   $run/checkpoints/best
  curves       $run/curves.svg
  TensorBoard  $run/tensorboard

Try next:
  $program train --config configs/fashion-vgg.yaml data.path=data/fashion-mnist optim.lr=0.05 train.epochs=3
  $program summary vgg16_bn --classes 10 --image-size 64
  $program train --help
REPORT
}
