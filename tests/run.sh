#!/usr/bin/env bash
# Installs what is missing, builds and runs every test. This is what CI runs.
#   ./tests/run.sh            everything that fits into CI
#   ./tests/run.sh --full     and the long ones: every golden combination
#   ./tests/run.sh --long     and the 10 minutes of clients that die at random (engram_soak)
#   ./tests/run.sh --sanitizers  builds and runs unit and smoke tests under ASan + UBSan, and what has threads and no gRPC under TSan, instead
#   ./tests/run.sh --filter R only the ctest entries that match the regular expression R
# Exit code 0 only if every test passed. The last lines are ctest's own summary, then one line of ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
full=0 long=0 sanitizers=0 filter=.
while (($#)); do
  case "$1" in
    --full) full=1 ;;
    --long) long=1 ;;
    --sanitizers) sanitizers=1 ;;
    --filter) filter=${2-}; [ -n "$filter" ] || { echo "run.sh: --filter needs a regular expression" >&2; exit 78; }; shift ;;
    --help | -h) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'; it takes --full, --long, --sanitizers, --filter R" >&2; exit 78 ;;
  esac
  shift
done

stage_start=$SECONDS
stage() { echo "== $1 (${SECONDS} s so far, last stage $((SECONDS - stage_start)) s)"; stage_start=$SECONDS; }

stage "packages"
deploy/install_packages.sh --tests
[ -x build/venv/bin/pip ] || python3 -m venv build/venv
build/venv/bin/pip install -q --disable-pip-version-check -r tests/e2e/requirements.txt
tests/fetch_tokenizer.sh || [ $? -eq 77 ]   # 77: not to be had here; what needs it is skipped

build() {  # build PRESET [TARGET...]
  local preset=$1 log=build/configure-$1.log
  shift
  cmake --preset "$preset" >"$log" 2>&1 || { tail -30 "$log"; exit 1; }
  cmake --build "build/$preset" ${1+--target "$@"}
}

if ((sanitizers)); then
  stage "asan"
  build asan
  ctest --no-tests=error --test-dir build/asan --output-on-failure -L 'unit|smoke' -R "$filter"
  # TSan reports races inside the packaged gRPC and Abseil, so only what has none of them.
  stage "tsan"
  threaded=(kernels_test kernels_{attention,engram,exl3,gemm,hyper_connection,indexer,moe,norm,quant,rope,sampling}_test
    shard_worker_model_test shard_worker_runtime_test gateway_scheduler_test gateway_text_test gateway_http_test
    engram_service_read_test)
  build tsan "${threaded[@]}"
  ctest --test-dir build/tsan --output-on-failure -R "^($(IFS='|'; echo "${threaded[*]}"))\$"
  stage "all passed"
  exit 0
fi

stage "build"
build release

stage "tests"
none=error   # a filter that matches nothing; with more stages it may match in one of them only
if ((full || long)); then none=ignore; fi
ctest --no-tests=$none --test-dir build/release --output-on-failure -LE 'full|long' -R "$filter"

if ((full)); then
  stage "full: long tests"
  ctest --test-dir build/release --output-on-failure -L full -R "$filter"
fi
if ((long)); then
  stage "long: soak"
  ctest --test-dir build/release --output-on-failure -L long -R "$filter"
fi
stage "all passed"
