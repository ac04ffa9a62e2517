#!/usr/bin/env bash
# Everything that a GPU has to say about the kernels, in one go: builds the checks and benchmarks with
# the CUDA compiler alone (or uses those in $PREBUILT), runs exactness, invariance and the sanitizer,
# then the benchmarks, and leaves logs and JSON lines in $OUT.
#   OUT=DIR [PREBUILT=DIR] [VECTORS=DIR] [TESTS=DIR] [ARCH=sm_90a] kernels/cuda/device_check.sh [step...]
# Steps: build check quick siblings sanitize ring soak linear linear-quick sweep moe moe-quick counters
# (default: build check linear moe). VECTORS
# is the folder of golden EXL3 matrices (manifest.json beside the .bin files), TESTS what
# pack_tests.sh made on a machine with the CPU build.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
out=${OUT:-build/device}
bin=${PREBUILT:-$out/bin}
arch=${ARCH:-sm_90a}   # a: with the warpgroup instructions of this one architecture
[[ $arch == sm_90 ]] && arch=sm_90a
mkdir -p "$out" "$bin"
export PATH=$PATH:/usr/local/cuda/bin
status=0

flags=(-std=c++20 -O3 "-gencode=arch=compute_${arch#sm_},code=$arch" -I. -fmad=false -lineinfo
  -Xcompiler=-fPIC)
sources=(kernels/exl3/*_cuda.cu kernels/moe/*_cuda.cu kernels/cuda/workspace_cuda.cu)

compile() {  # folder of the objects, more flags; files from stdin
  local to=$1
  shift
  mkdir -p "$to"
  xargs -P "$(nproc)" -I{} sh -c 'nvcc "$@" -c {} -o '"$to"'/$(basename {} .cu).o' sh "${flags[@]}" "$@"
}

link() {  # folder of the objects, program with what nvcc wants to know
  local from=$1 objects=()
  shift
  for s in "${sources[@]}"; do objects+=("$from/$(basename "$s" .cu).o"); done
  nvcc "-gencode=arch=compute_${arch#sm_},code=$arch" "${objects[@]}" "$@"
}

build() {
  [[ -n ${PREBUILT:-} ]] && return
  local module=kernels/cuda/cuda_module.cu
  local programs=(kernels/cuda/device_check.cu kernels/exl3/exl3_linear_gpu_bench.cu kernels/moe/moe_gpu_bench.cu)
  printf '%s\n' "${sources[@]}" "${programs[@]}" "$module" | compile "$bin/obj" || return 1
  for p in "${programs[@]}"; do
    local name
    name=$(basename "$p" .cu)
    link "$bin/obj" "$bin/obj/$name.o" -o "$bin/$name" || return 1
  done
  link "$bin/obj" -shared "$bin/obj/cuda_module.o" -o "$bin/libtwinspark_cuda.so"
}

# device_check for racecheck: every lane gives a stage of a ring back, see README.md.
build_race() {
  [[ -n ${PREBUILT:-} ]] && return
  printf '%s\n' "${sources[@]}" kernels/cuda/device_check.cu |
    compile "$bin/race" -DTWINSPARK_EVERY_LANE_ARRIVES &&
    link "$bin/race" "$bin/race/device_check.o" -o "$bin/device_check_race"
}

run() {  # name, seconds, command
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local rc=$?
  [[ $rc == 0 ]] || status=1
  tail -n "${LINES_SHOWN:-40}" "$out/$name.log"
  echo "== $name: exit $rc after ${SECONDS}s"
}

steps=("$@")
[[ ${#steps[@]} == 0 ]] && steps=(build check linear moe)
for step in "${steps[@]}"; do
  case $step in
    build) build || exit 1 ;;
    check) run check 240 "$bin/device_check" ${VECTORS:+--vectors="$VECTORS"} ;;
    quick) run quick 120 "$bin/device_check" --quick ${VECTORS:+--vectors="$VECTORS"} ;;
    sanitize)
      run memcheck 120 compute-sanitizer --tool memcheck --error-exitcode 9 "$bin/device_check" --quick
      build_race || exit 1
      race=(compute-sanitizer --tool racecheck --error-exitcode 9 "$bin/device_check_race" --quick)
      run racecheck-experts 120 "${race[@]}" --from=99
      run racecheck-linear 120 "${race[@]}" --from=2 --linear=8
      run racecheck-large 300 "${race[@]}" --linear=2  # hundreds of blocks
      ;;
    ring)  # what racecheck says of a ring that is right and of one that is not: no verdict here
      for form in lane-zero stores every-lane too-early; do
        compute-sanitizer --tool racecheck "$bin/device_check" --ring=$form 2>&1 | tee -a "$out/ring.log" |
          grep -E '^ring|SUMMARY'
      done
      ;;
    siblings)  # against the CPU ops, whose programs were built elsewhere (pack_tests.sh)
      export TWINSPARK_CUDA_MODULE=$bin/libtwinspark_cuda.so
      for test in exl3_linear_cuda_test moe_cuda_test; do
        LD_LIBRARY_PATH=${TESTS:?a folder made by pack_tests.sh}/lib run "$test" 200 "$TESTS/$test"
      done
      ;;
    linear) run linear 200 "$bin/exl3_linear_gpu_bench" --json="$out/linear.json" ;;
    linear-quick) run linear 120 "$bin/exl3_linear_gpu_bench" --quick --json="$out/linear.json" ;;
    sweep) run sweep 120 "$bin/exl3_linear_gpu_bench" --sweep ;;
    moe) run moe 200 "$bin/moe_gpu_bench" --json="$out/moe.json" ;;
    soak) run soak 120 "$bin/moe_gpu_bench" --soak=10 ;;
    moe-quick) run moe 120 "$bin/moe_gpu_bench" --quick --json="$out/moe.json" ;;
    counters)  # one gate/up and one down kernel of 8 rows, then linears; Nsight Compute
      run counters 100 ncu --clock-control none --section SpeedOfLight --section WarpStateStats \
        --section SchedulerStats --section InstructionStats --section Occupancy --section MemoryWorkloadAnalysis \
        -k regex:Exl3Gemm --launch-skip "${SKIP:-20}" --launch-count 2 "$bin/moe_gpu_bench" --quick --rows=8
      ;;
    *) echo "unknown step $step"; exit 2 ;;
  esac
done
exit $status
