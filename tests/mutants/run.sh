#!/usr/bin/env bash
# Breaks each invariance on purpose and sees exactly the tests that guard it fail; see mutants.py.
set -euo pipefail
exec python3 "$(dirname "${BASH_SOURCE[0]}")/mutants.py" "$@"
