#!/usr/bin/env bash
# libFuzzer (clang) with ASan and UBSan over every fuzz target of the repository; for hours when nobody waits.
#   tests/fuzz.sh                       ten minutes each, one after the other
#   tests/fuzz.sh --seconds S --jobs J  S seconds each, J at a time
#   tests/fuzz.sh NAME...               only these, e.g. tests/fuzz.sh http_parser_fuzz
# Prints one line per target: seconds, executions, result. What it finds lies in build/fuzz/findings; a fixed finding goes to
# tests/corpus/NAME, which every later run, the smoke runs of ctest included, begins with.
# Exit codes: 0 nothing found, 1 something found, 78 bad argument.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=600 jobs=1 names=()
while (($#)); do
  case "$1" in
    --seconds | --jobs)
      [[ ${2-} =~ ^[1-9][0-9]*$ ]] || { echo "fuzz.sh: $1 needs a whole number from 1, not '${2-}'" >&2; exit 78; }
      declare "${1#--}=$2"
      shift
      ;;
    --help | -h) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    -*) echo "fuzz.sh: unknown argument '$1'; it takes --seconds, --jobs, names of targets" >&2; exit 78 ;;
    *) names+=("$1") ;;
  esac
  shift
done

build=build/fuzz
mkdir -p build
cmake --preset fuzz >build/configure-fuzz.log 2>&1 || { tail -30 build/configure-fuzz.log; exit 1; }
if ((${#names[@]})); then
  cmake --build "$build" --target "${names[@]}"
else
  cmake --build "$build" --target fuzzers
  mapfile -t names < <(git grep -l LLVMFuzzerTestOneInput -- '*_fuzz.cc' | xargs -n 1 basename -s .cc | sort)
fi
mkdir -p "$build/findings" "$build/corpus" "$build/log"

fuzz_one() {  # fuzz_one NAME; one line of the table, exit code of the fuzzer
  local name=$1 log=$build/log/$1.txt status=0 old=()
  mkdir -p "$build/corpus/$name"
  [ -d "tests/corpus/$name" ] && old=("tests/corpus/$name")
  "$build/bin/$name" -max_total_time="$seconds" -timeout=25 -print_final_stats=1 -artifact_prefix="$build/findings/$name-" \
    "$build/corpus/$name" "${old[@]}" >"$log" 2>&1 || status=$?
  printf '%-22s %5s s %12s executions  %s\n' "$name" "$(sed -n 's/^Done [0-9]* runs in \([0-9]*\) second.*/\1/p' "$log" | tail -1)" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)" \
    "$( ((status)) && echo "FOUND SOMETHING, see $log" || echo clean)"
  return $status
}

found=0
for name in "${names[@]}"; do
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n || found=1; done
  fuzz_one "$name" &
done
while [ -n "$(jobs -rp)" ]; do wait -n || found=1; done
exit $found
