#!/usr/bin/env bash
# One command to a running cluster on this machine: installs packages, builds, starts 2 engram_services, 2 shard_workers and 1 gateway
# on the embedded demo model, asks "What is 17*19?" and leaves the cluster on port 8888.
#
#   deploy/quickstart.sh [--port P] [--model DIR] [--tp 1|2]
#   deploy/quickstart.sh --smoke      stops the cluster after the answer; exit 0 only if it was 323
#   deploy/quickstart.sh --stop       stops a running one, on whatever port
#   deploy/quickstart.sh --status     one line about it; exit 69 when it is not ready
#
# A running cluster of this checkout is used as it is when it is this build with this model, TP, port and these settings, else
# replaced; --smoke starts one of its own beside it, on a free port. It listens on 127.0.0.1; LISTEN_ADDR=0.0.0.0 opens it to your
# network (then set API_KEY_FILE too). Settings of deploy/.env.example can be given in the environment: PORT and MODEL_DIR mean --port
# and --model, METRICS_ADDR=HOST:P gives the gateway P and the others the ports after it, paths are relative to where you are; those
# that differ per process (WORKERS, ENGRAM_RANK, ...) are refused by name.
#
# Ctrl-C, SIGTERM, SIGKILL or a failing part at any moment before it returns leaves no process behind.
# Exit codes: 0 done, 1 wrong answer, 69 packages, build or a part failed, 78 bad argument or setting, 130 interrupted.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
bin=$checkout/build/release/bin

usage() { sed -n '2,17p' "$checkout/deploy/quickstart.sh" | sed 's/^# \{0,1\}//'; }
verb=up
pass=()
while (($#)); do
  case "$1" in
    --stop) verb=down ;;
    --status) verb=status ;;
    --smoke) pass+=("$1") ;;
    --port | --model | --tp)
      value=${2-}
      case "$1" in
        --port) if ! [[ $value =~ ^[0-9]{1,5}$ ]] || ((10#$value > 65535)); then echo "quickstart.sh: --port '$value': expected a port from 0 to 65535" >&2; exit 78; fi ;;
        --tp) if [[ $value != [12] ]]; then echo "quickstart.sh: --tp '$value': expected 1 or 2" >&2; exit 78; fi ;;
        --model)
          [[ $value == /* ]] || value=$called_from/$value
          [ -r "$value/config.json" ] || { echo "quickstart.sh: --model '${2-}': no config.json in $value" >&2; exit 78; } ;;
      esac
      pass+=("$1" "$value"); shift ;;
    --help | -h) usage; exit 0 ;;
    *) echo "quickstart.sh: unknown argument '$1'" >&2; usage >&2; exit 78 ;;
  esac
  shift
done
if [ "$verb" != up ]; then
  if [ ! -x "$bin/local_cluster" ]; then echo "nothing is built here, so no cluster of this checkout is running"; exit 0; fi
  exec "$bin/local_cluster" "$verb"
fi

# Runs a command in a process group of its own that ends when this script does, SIGKILL included: a watcher outside the group reads
# a pipe that only this script holds open.
exec {watched}> >(
  trap '' INT TERM HUP
  group=
  while read -r line; do group=$line; done
  [ -z "$group" ] || kill -TERM -- "-$group" 2>/dev/null || exit 0
  for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; kill -0 -- "-$group" 2>/dev/null || exit 0; done
  kill -KILL -- "-$group" 2>/dev/null || true
)
guarded() {  # guarded LOG COMMAND...: shows the last line of LOG every few seconds
  local log=$1 status=0 seconds=0 shown='' line
  shift
  setsid "$@" {watched}>&- </dev/null >>"$log" 2>&1 &
  local pid=$!
  echo "$pid" >&"$watched"
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    ((++seconds % 10)) || {
      line=$(tail -n 1 "$log" | cut -c1-100)
      [ "$line" = "$shown" ] || echo "  $line"
      shown=$line
    }
  done
  wait "$pid" || status=$?
  echo >&"$watched"
  return "$status"
}
trap 'exit 130' INT TERM HUP

fail() { tail -n 20 "$log" >&2; echo "quickstart.sh: $1; the whole log: $log" >&2; exit 69; }
log=$checkout/run/build.log
mkdir -p "$checkout/run"
: >"$log"
export NINJA_STATUS='built %f of %t, %e s: '
echo "packages (log: run/build.log) ..."
guarded "$log" deploy/install_packages.sh || fail "installing packages failed"
echo "build ..."
guarded "$log" cmake --preset release || fail "configuring failed"
guarded "$log" cmake --build build/release --target gateway shard_worker engram_service local_cluster || fail "the build failed"
exec {watched}>&-
cd "$called_from"  # what paths in settings are relative to
exec "$bin/local_cluster" up "${pass[@]}"
