#!/usr/bin/env bash
# Every speed figure of the row service in one run, the drive's own beside it: makes a synthetic table larger than the
# reads can cache (17 GB and 9 GB packed), packs it, then reads. On a machine that does nothing else; needs fio.
#   tests/engram/row_bench.sh DIR [BIN]     DIR on the drive to be measured; 27 GB are written there and deleted again
# Exit code 0 only if every bound is met.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dir=${1:?give a directory on the drive to be measured} bin=${2:-build/release/bin}
work=$(mktemp -d "$dir/row_bench.XXXXXX")
trap 'rm -rf "$work"' EXIT
code=0

"$bin/synth_table" --out "$work/model" --config deploy/demo_model/config.json --mib 17000
sync
table=$work/model/engram-00001-of-00002.safetensors
echo "== fio, the drive alone, 16 MiB transfers"
rate() {  # rate NAME FIELD fio arguments...: MB/s
  local name=$1 field=$2
  shift 2
  echo "$name $(fio --name="$name" --bs=16m --direct=1 --ioengine=psync --output-format=terse "$@" | cut -d';' -f"$field" | awk '{printf "%.0f MB/s", $1 * 1024 / 1e6}')"
}
rate read 7 --filename="$table" --readonly --rw=read --size=2g
rate write 48 --filename="$work/written" --rw=write --size=2g --fallocate=posix --end_fsync=1
rm -f "$work/written"

echo "== pack_rows (rank 0 of 2)"
mkdir "$work/packed"
"$bin/pack_rows" --model-dir "$work/model" --out "$work/packed" --rank 0 --world 2 --rates 2>"$work/progress" >"$work/packing" ||
  { cat "$work/progress"; exit 1; }
cat "$work/packing"
# Source and packed file lie on one drive here, so its rates with both at once are what can be had.
awk '/^packed at/ { n++; sum += $10 }
     END { met = n > 0 && sum / n >= 0.9
           printf "packing, of the drive'"'"'s slower rate with both at once: %.2f, wanted >= 0.90: %s\n", sum / n, met ? "yes" : "NO"
           exit !met }' "$work/packing" || code=1
echo "== verify_rows against the source, every row"
"$bin/verify_rows" --model-dir "$work/model" --packed-dir "$work/packed" --rank 0 --world 2 --mode source-full 2>/dev/null || code=1
for depth in 32 128; do
  echo "== engram_bench, depth $depth"
  "$bin/engram_bench" --dir "$work/model" --packed "$work/packed" --depth "$depth" 2>/dev/null || code=1
done
exit $code
