#!/usr/bin/env bash
# Installs what building and running TwinSpark needs from the distribution's own packages; does nothing when all is there.
#   deploy/install_packages.sh            build and run
#   deploy/install_packages.sh --tests    and what ./tests/run.sh needs
#   deploy/install_packages.sh --arm64    and what the arm64 cross-build needs
#   deploy/install_packages.sh --list     only prints the packages
# Debian 12 is tested. On Ubuntu 24.04 (DGX OS) the names differ in Boost; the newest one that apt offers is taken.
# CUDA Toolkit and NCCL are optional, come from NVIDIA, and are never downloaded by a script of ours.
# Exit codes: 0 done, 69 packages cannot be had, 78 bad argument.
set -euo pipefail

want_tests=0 want_arm64=0 only_list=0
for argument in "$@"; do
  case "$argument" in
    --tests) want_tests=1 ;;
    --arm64) want_arm64=1 ;;
    --list) only_list=1 ;;
    --help | -h) sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "install_packages.sh: unknown argument '$argument'; it takes --tests, --arm64, --list" >&2; exit 78 ;;
  esac
done

installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'; }
offered() { apt-cache show "$1" >/dev/null 2>&1; }

# Boost 1.81 on Debian 12 (its default 1.74 lacks JSON and URL), the distribution's default elsewhere.
boost_packages() {
  local version
  for version in 1.81 1.83 1.88 1.90; do
    if installed "libboost${version}-dev" || offered "libboost${version}-dev"; then
      echo "libboost${version}-dev libboost-json${version}-dev libboost-url${version}-dev"
      return
    fi
  done
  echo "libboost-dev libboost-json-dev libboost-url-dev"
}

packages() {
  echo g++ make cmake ninja-build ccache pkg-config git ca-certificates
  echo protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libgrpc++-dev libabsl-dev
  boost_packages
  echo prometheus-cpp-dev libgtest-dev libgmock-dev libbenchmark-dev
  echo libcurl4-openssl-dev liburing-dev libhwy-dev libpcre2-dev libutf8proc-dev libxxhash-dev libssl-dev
  if ((want_tests)); then echo curl jq python3 python3-venv prometheus shellcheck; fi
  if ((want_arm64)); then echo g++-aarch64-linux-gnu qemu-user; fi
}

missing_packages() {
  local package
  for package in $(packages); do installed "$package" || echo "$package"; done
}

if ((only_list)); then packages | tr ' ' '\n'; exit 0; fi

if [ -z "$(missing_packages)" ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "install_packages.sh: this system has no apt-get; install by hand: $(packages | tr '\n' ' ')" >&2
  exit 69
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "install_packages.sh: run as root once, or install sudo; missing: $(missing_packages | tr '\n' ' ')" >&2; exit 69; }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" dpkg --configure -a
"${as_root[@]}" apt-get update -qq || echo "install_packages.sh: apt-get update failed; trying with the lists that are there" >&2
# Asked again: which Boost is on offer is known only now.
missing=$(missing_packages)
echo "installing: $(echo "$missing" | tr '\n' ' ')"
# prometheus and other services among the test tools must not start by themselves.
policy=
if [ ! -e /usr/sbin/policy-rc.d ] && ((want_tests)); then
  policy=/usr/sbin/policy-rc.d
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod 755 "$policy"
fi
status=0
# shellcheck disable=SC2086 # one word a package
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/tmp/twinspark-apt.$$ 2>&1 || status=$?
[ -z "$policy" ] || "${as_root[@]}" rm -f "$policy"
if ((status)); then
  tail -20 /tmp/twinspark-apt.$$ >&2
  echo "install_packages.sh: apt-get failed with $status; its whole output: /tmp/twinspark-apt.$$" >&2
  exit 69
fi
rm -f /tmp/twinspark-apt.$$
