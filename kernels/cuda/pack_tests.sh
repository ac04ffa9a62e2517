#!/usr/bin/env bash
# Puts the tests of CUDA ops against their CPU siblings and every library that they need, but for
# those of the compiler and the C library, into one folder that can be carried to a machine with a
# GPU and nothing else: device_check.sh siblings.
#   kernels/cuda/pack_tests.sh BUILD_DIR TO_DIR
set -euo pipefail
build=$1 to=$2
mkdir -p "$to/lib"
for test in exl3_linear_cuda_test moe_cuda_test; do
  cp "$build/bin/$test" "$to/"
  strip "$to/$test"
  ldd "$build/bin/$test" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' |
    grep -vE '/(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.so' | xargs -r cp -Lt "$to/lib"
done
