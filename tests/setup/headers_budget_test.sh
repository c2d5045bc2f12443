#!/usr/bin/env bash
# headers_test.sh with three headers and a compiler that only notes them. Usage: headers_budget_test.sh SOURCE LIBTORCH
set -euo pipefail
source_root="$1"
# shellcheck source=tests/setup/check.sh
. "$source_root/tests/setup/check.sh"
tree="$SCRATCH/tree" compiler="$SCRATCH/compiler"
mkdir -p "$tree/cohort/a"
printf '#pragma once\n' >"$tree/cohort/a/plain.h"
printf '#include <torch/types.h>\n' >"$tree/cohort/a/of_torch.h"
printf '#include "cohort/a/of_torch.h"\nbroken\n' >"$tree/cohort/a_of_torch.h"  # its name is another one's with _ for /
cat >"$compiler" <<'SCRIPT'
#!/usr/bin/env bash
if [ "$1" = --version ]; then echo "compiler 1" && exit; fi
read -r include && echo "$include" >>"$COMPILED"
header="${include#*<}"
if grep broken "${header%>}" >/dev/null; then echo "error: broken" >&2 && exit 1; fi
SCRIPT
chmod +x "$compiler"

# headers STAMPS SECONDS
headers() { COMPILED="$SCRATCH/compiled" bash "$source_root/tests/setup/headers_test.sh" "$tree" /nowhere "$compiler" "$SCRATCH/$1" "$2"; }

expect "a header with LibTorch that does not compile fails the first run" 1 \
  "FAILED cohort/a_of_torch.h does not compile as the first header of a source: error: broken 3 headers compiled, 1 of them failed" \
  headers all 600
expect "it fails the second run, and those that passed are known" 1 \
  "1 headers compiled, 1 of them failed, 2 have not changed since they passed, 0 left for the next run" headers all 600
printf '#include "cohort/a/of_torch.h"\n' >"$tree/cohort/a_of_torch.h"
expect "it passes once it is mended" 0 "1 headers compiled, 0 of them failed, 2 have not changed" headers all 600
expect "then all are known" 0 "0 headers compiled, 0 of them failed, 3 have not changed" headers all 600

: >"$SCRATCH/compiled"
expect "without time the first run compiles one" 0 \
  "1 headers compiled, 0 of them failed, 0 have not changed since they passed, 2 left for the next run" headers few 0
expect "of those without LibTorch" 0 "#include <cohort/a/plain.h>" cat "$SCRATCH/compiled"
expect "the next run continues" 0 "1 headers compiled, 0 of them failed, 1 have not changed since they passed, 1 left" headers few 0
finish
