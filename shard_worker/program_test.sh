#!/usr/bin/env bash
# The program itself: how it ends. Exit codes and one-line reasons of bad starts, the lifeline, a drain when
# idle. Usage: program_test.sh SHARD_WORKER. Ends only what it started.
set -u
worker=$1
dir=$(mktemp -d)
failures=0
pid=

finish() {
  [ -n "$pid" ] && kill -KILL "$pid" 2>/dev/null
  rm -rf "$dir"
}
trap finish EXIT

check() {  # what expected actual
  if [ "$2" != "$3" ]; then
    echo "FAIL $1: expected $2, got $3"
    failures=$((failures + 1))
  else
    echo "ok   $1"
  fi
}

says() {  # what pattern file
  if ! grep -q -- "$2" "$3"; then
    echo "FAIL $1: no \"$2\" in:"
    cat "$3"
    failures=$((failures + 1))
  else
    echo "ok   $1"
  fi
}

start() {  # extra flags; leaves pid and address
  rm -f "$dir/port"
  "$worker" --worker-listen 127.0.0.1:0 --compute-threads 1 --port-file "$dir/port" "$@" 2>"$dir/log" &
  pid=$!
  for _ in $(seq 600); do
    [ -s "$dir/port" ] && break
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.05
  done
  address=$(cat "$dir/port" 2>/dev/null)
}

wait_end() {  # sets code; 30 s at most
  for _ in $(seq 600); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.05
  done
  if kill -0 "$pid" 2>/dev/null; then code=running; else wait "$pid"; code=$?; pid=; fi
}

"$worker" --no-such-flag 1 2>"$dir/log"
check "unknown flag" 78 $?
says "unknown flag is named" "no-such-flag" "$dir/log"

"$worker" --compute-threads -3 2>"$dir/log"
check "value out of range" 78 $?
says "range is named" "COMPUTE_THREADS" "$dir/log"

"$worker" --backend cuda --worker-listen 127.0.0.1:0 2>"$dir/log"
check "backend that this build lacks" 78 $?

start
first=$pid
"$worker" --worker-listen "$address" 2>"$dir/log2"
check "taken port" 78 $?
says "taken port is named" "$address" "$dir/log2"
check "one line for a taken port" 1 "$(grep -c ERROR "$dir/log2")"

kill -TERM "$first"
wait_end
check "SIGTERM when idle" 0 "$code"

mkfifo "$dir/pipe"
exec 7<>"$dir/pipe"        # keeps the fifo open while both ends are made
exec 8>"$dir/pipe" 9<"$dir/pipe"
exec 7>&-
rm -f "$dir/port"
"$worker" --worker-listen 127.0.0.1:0 --compute-threads 1 --port-file "$dir/port" --lifeline-fd 9 8>&- 2>"$dir/log" &
pid=$!
exec 9<&-
for _ in $(seq 600); do [ -s "$dir/port" ] && break; sleep 0.05; done
exec 8>&-
wait_end
check "lifeline closed" 130 "$code"

exit $((failures > 0))
