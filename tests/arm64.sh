#!/usr/bin/env bash
# Cross-builds for arm64 and runs the unit tests under qemu. Not part of CI: emulation is slow.
#   tests/arm64.sh [ctest regular expression]     default: every unit test
# Packages for arm64 go into build/arm64-sysroot, never beside the machine's own (they would push some of those out).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
filter=${1:-.}
deploy/install_packages.sh --tests --arm64
sysroot=$PWD/build/arm64-sysroot
if [ ! -e "$sysroot/.complete" ]; then
  lists=$PWD/build/arm64-apt
  mkdir -p "$sysroot" "$lists/lists/partial" "$lists/cache/archives/partial"
  : >"$lists/status"
  options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::Status=$lists/status"
    -o "Dir::State::Lists=$lists/lists" -o "Dir::Cache=$lists/cache" -o Debug::NoLocking=1)
  apt-get "${options[@]}" update -qq
  # Libraries and headers only; compilers and tools run on this machine.
  mapfile -t packages < <(deploy/install_packages.sh --list | grep -E -- '-dev$')
  apt-get "${options[@]}" install -y -qq --download-only --no-install-recommends "${packages[@]}" libc6-dev libstdc++-12-dev protobuf-compiler-grpc protobuf-compiler
  for package in "$lists"/cache/archives/*.deb; do dpkg -x "$package" "$sysroot"; done
  # Absolute links would leave the sysroot.
  find "$sysroot" -type l -lname '/*' | while read -r link; do
    target=$(readlink "$link")
    ln -sfn "$(realpath -m --relative-to="$(dirname "$link")" "$sysroot$target")" "$link"
  done
  # gRPC's package file wants its plug-ins there; they run on this machine.
  for tool in protoc grpc_cpp_plugin grpc_csharp_plugin grpc_node_plugin grpc_objective_c_plugin grpc_php_plugin grpc_python_plugin grpc_ruby_plugin; do
    if [ -e "/usr/bin/$tool" ]; then cp "/usr/bin/$tool" "$sysroot/usr/bin/$tool"; fi
  done
  touch "$sysroot/.complete"
fi
cmake -S . -B build/arm64 -G Ninja -DCMAKE_BUILD_TYPE=Release -DTWINSPARK_SYSROOT="$sysroot" \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" >build/configure-arm64.log 2>&1 || { tail -30 build/configure-arm64.log; exit 1; }
cmake --build build/arm64
ctest --test-dir build/arm64 --output-on-failure -L 'unit|smoke' -R "$filter" --timeout 1800
