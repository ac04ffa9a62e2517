#!/usr/bin/env bash
# Installs what is missing, builds and runs every test. This is what CI runs.
#   ./tests/run.sh            everything that fits into CI
#   ./tests/run.sh --full     and the long ones: all golden combinations, sanitizers, mutants, load; prints a summary
#   ./tests/run.sh --filter R only the ctest entries that match the regular expression R
# Exit code 0 only if every test passed. The last lines are ctest's own summary, then one line of ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
full=0 filter=.
while (($#)); do
  case "$1" in
    --full) full=1 ;;
    --filter) filter=${2:?--filter needs a regular expression}; shift ;;
    --help | -h) sed -n '2,6p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'; it takes --full, --filter R" >&2; exit 78 ;;
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

stage "build"
cmake --preset release >build/configure.log 2>&1 || { tail -30 build/configure.log; exit 1; }
cmake --build build/release

stage "tests"
ctest --test-dir build/release --output-on-failure -LE full -R "$filter"

if ((full)); then
  stage "full: long tests"
  ctest --test-dir build/release --output-on-failure -L full -R "$filter"
  for preset in asan tsan; do
    stage "full: $preset"
    cmake --preset "$preset" >"build/configure-$preset.log" 2>&1 || { tail -30 "build/configure-$preset.log"; exit 1; }
    cmake --build "build/$preset"
    ctest --test-dir "build/$preset" --output-on-failure -LE 'full|e2e' -R "$filter"
  done
fi
stage "all passed"
