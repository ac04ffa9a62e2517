#!/usr/bin/env bash
# can_fail.sh PROGRAM DIR FILE OFFSET XOR [ARG...]: a golden program must notice one changed byte.
# Copies DIR, changes byte OFFSET of FILE by XOR, runs PROGRAM --dir COPY ARG... and exits 0 only if
# the program exits 1 on the copy with the change and 0 without it.
set -euo pipefail
program=$1 dir=$2 file=$3 offset=$4 xor=$5
shift 5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -rL "$dir" "$work/copy"
chmod -R u+w "$work/copy"
"$program" --dir "$work/copy" "$@" > "$work/log" || { code=$?; tail -3 "$work/log"; echo "fails unchanged"; exit $((code == 77 ? 77 : 1)); }
byte=$(od -An -tu1 -j "$offset" -N1 "$work/copy/$file")
printf "\\x$(printf %x $((byte ^ xor)))" | dd of="$work/copy/$file" bs=1 seek="$offset" conv=notrunc status=none
status=0
"$program" --dir "$work/copy" "$@" > "$work/log" || status=$?
tail -2 "$work/log"
if [ "$status" -ne 1 ]; then
  echo "exit $status with byte $offset of $file changed, expected 1"
  exit 1
fi
