#!/usr/bin/env python3
"""The repository's own lint. Reads tracked files as text; prints one line per finding; exit code 1 when there is any.

Rules: file heads, leftover words, words that do not belong here, who may include whom, system headers per folder, functions that
grow past 70 lines (a ratchet: tests/tidy/long_functions.txt lists today's exceptions with their length), dead files, folders without
a README, README links that lead nowhere, co_await with a temporary (GCC 12 destroys it twice), scripts without a head.

    tests/tidy/tidy.py            check
    tests/tidy/tidy.py --update   rewrite long_functions.txt with today's lengths (only ever to shorten it)
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CODE = (".h", ".cc", ".cu", ".cuh")
MAX_FUNCTION_LINES = 70

# Which of our folders a folder may include. A longer prefix wins. `proto` headers are generated.
MAY_INCLUDE = {
    "common": ["common"],
    "common/rpc": ["common"],
    "proto": ["proto"],
    "kernels": ["common", "kernels"],
    "engram_service": ["common", "proto", "engram_service"],
    "shard_worker": ["common", "proto", "kernels", "shard_worker"],
    "shard_worker/model": ["common", "kernels", "shard_worker"],
    "shard_worker/parallel": ["common", "shard_worker"],
    "gateway": ["common", "proto", "gateway"],
    "gateway/scheduler": ["common", "gateway/scheduler"],
    "gateway/text": ["common", "gateway/text"],
    "gateway/http": ["common", "gateway/http"],
    "deploy": ["common", "proto", "deploy"],
    "tests": ["common", "proto", "kernels", "engram_service", "shard_worker", "gateway", "deploy", "tests"],
}
# Tests of a folder may also use these.
TEST_EXTRA = ["common/testing", "kernels/testing"]

# Third-party headers: where each may be included. Standard and POSIX headers are free.
THIRD_PARTY = {
    r"grpc(pp)?/": ["common/rpc", "proto", "engram_service", "shard_worker/service", "shard_worker/engram", "shard_worker",
                    "gateway/engine", "gateway", "tests", "deploy"],
    r"google/protobuf/": ["proto", "common/rpc", "tests", "shard_worker/service", "gateway/engine", "engram_service", "shard_worker"],
    r"boost/(beast|asio)": ["gateway/http", "gateway/gateway.cc", "gateway/main.cc"],
    r"boost/json": ["common", "gateway", "engram_service", "deploy", "tests", "shard_worker/model", "shard_worker/budget", "kernels"],
    r"boost/url": ["gateway"],
    r"prometheus/": ["common", "gateway", "shard_worker", "engram_service"],
    r"hwy/": ["kernels"],
    r"(cuda|nccl|cub/|mma)": ["kernels", "shard_worker/runtime", "shard_worker/parallel"],
    r"pcre2|utf8proc": ["gateway/text", "engram_service/tools", "engram_service/store"],
    r"liburing": ["engram_service/io"],
    r"curl/": ["deploy", "tests"],
    r"xxhash": ["common", "engram_service", "shard_worker"],
    r"(gtest|gmock|benchmark)/": ["*"],
}

LEFTOVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bnot implemented\b|\bprintf-debug")
BELONGS_NOT = re.compile(r"/wor[k]/|\.\./share[d]\b|\bthis sessio[n]\b|\bissue #?[0-9]+\b")


def tracked_files():
    out = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=True).stdout
    return sorted(f for f in out.decode().split("\0") if f and os.path.isfile(os.path.join(ROOT, f)))


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8", errors="replace") as file:
        return file.read()


def longest_prefix(table, path):
    folder = os.path.dirname(path)
    while folder:
        if folder in table:
            return table[folder]
        folder = os.path.dirname(folder)
    return None


def is_test(path):
    return re.search(r"_(test|bench|fuzz)\.(cc|cu)$", path) is not None or "/testing/" in path


def check_head(path, text):
    first = text.split("\n", 1)[0]
    own_header = f'#include "{path.rsplit(".", 1)[0]}.h"'  # its head speaks for both
    if path.endswith(CODE + (".proto",)) and not first.startswith("//") and first != own_header:
        yield f"{path}:1: no file head: say what the file owns, assumes and who calls it"
    if path.endswith((".sh", ".py")) and not re.match(r"#!.*\n(#|\"\"\")", text):
        if os.path.basename(path) != "__init__.py" and not text.startswith('"""'):
            yield f"{path}:1: a script begins with its interpreter and what it is for"
    if path.endswith(".h") and not path.endswith("-inl.h") and "#pragma once" not in text:
        yield f"{path}:1: no #pragma once"


def check_words(path, text):
    if path.startswith("tests/tidy/"):
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not path.endswith(".md") and LEFTOVER.search(line):
            yield f"{path}:{number}: leftover: {line.strip()[:90]}"
        if BELONGS_NOT.search(line):
            yield f"{path}:{number}: does not belong in the repository: {line.strip()[:90]}"


def check_includes(path, text):
    if not path.endswith(CODE):
        return
    allowed = longest_prefix(MAY_INCLUDE, path)
    for number, line in enumerate(text.split("\n"), 1):
        ours = re.match(r'\s*#include "([^"]+)"', line)
        system = re.match(r"\s*#include <([^>]+)>", line)
        if ours and ours.group(1).startswith("../"):
            yield f"{path}:{number}: includes name the path from the root, not {ours.group(1)}"
        elif ours and "/" in ours.group(1):
            name = ours.group(1)
            top = name.split("/")[0]
            if top in ("absl", "boost", "google", "grpcpp", "hwy", "prometheus"):
                yield from check_third_party(path, number, name)
                continue
            extra = TEST_EXTRA + [f"{path.split('/')[0]}/testing", f"{os.path.dirname(path)}/testing"] if is_test(path) else []
            if allowed is not None and not any(name.startswith(a + "/") for a in allowed + extra):
                if not (is_test(path) and path.startswith("shard_worker/") and name.startswith("engram_service/")):
                    yield f"{path}:{number}: {os.path.dirname(path)} may not include {name}"
        elif system:
            yield from check_third_party(path, number, system.group(1))


def check_third_party(path, number, name):
    for pattern, folders in THIRD_PARTY.items():
        if re.match(pattern, name):
            if "*" not in folders and not any(path == f or path.startswith(f + "/") for f in folders):
                yield f"{path}:{number}: {name} is not for this folder (tests/tidy/tidy.py THIRD_PARTY)"


def functions(text):
    """(name, first line, lines) of functions, by brace matching: a brace whose head ends with a parameter list opens one."""
    text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', "", text)
    text = re.sub(r"^\s*#(?:[^\n\\]|\\\n|\\.)*", lambda m: "\n" * m.group().count("\n"), text, flags=re.M)
    head_start, line, depth, inside = 0, 1, 0, None
    for position, char in enumerate(text):
        if char == "\n":
            line += 1
        elif char == "{":
            depth += 1
            head = text[head_start:position]
            head_start = position + 1
            if inside is None and "(" in head and not re.match(r"\s*(namespace|struct|class|enum|union|extern|else|do)\b", head):
                name = re.search(r"([~\w:]+)\s*\(", head)
                first = line - head.lstrip().count("\n")
                inside = (name.group(1) if name else "?", first, depth)
        elif char == "}":
            if inside is not None and depth == inside[2]:
                yield inside[0], inside[1], line - inside[1] + 1
                inside = None
            depth -= 1
            head_start = position + 1
        elif char == ";":
            head_start = position + 1


def long_functions(files):
    found = {}
    for path in files:
        if not path.endswith((".cc", ".h")) or path.startswith(("kernels/", "shard_worker/model/forward")):
            continue
        for name, _, length in functions(read(path)):
            if length > MAX_FUNCTION_LINES:
                key = f"{path} {name}"
                found[key] = max(found.get(key, 0), length)
    return found


def check_function_length(files):
    listed = {}
    ratchet = os.path.join(ROOT, "tests/tidy/long_functions.txt")
    if os.path.exists(ratchet):
        for line in open(ratchet, encoding="utf-8"):
            if line.strip() and not line.startswith("#"):
                path, name, length = line.split()
                listed[f"{path} {name}"] = int(length)
    found = long_functions(files)
    for key, length in sorted(found.items()):
        if length > listed.get(key, MAX_FUNCTION_LINES):
            yield f"{key.split()[0]}: function {key.split()[1]} has {length} lines, more than {listed.get(key, MAX_FUNCTION_LINES)}"
    for key in listed:
        if key not in found:
            yield f"tests/tidy/long_functions.txt: '{key}' is short now; delete its line"


def check_links(path, text):
    if not path.endswith(".md"):
        return
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        if not os.path.exists(os.path.join(ROOT, os.path.dirname(path), target)):
            yield f"{path}: link leads nowhere: {target}"


def check_readmes(files):
    for folder in sorted({f.split("/")[0] for f in files if "/" in f and not f.startswith(".")}):
        if folder + "/README.md" not in files:
            yield f"{folder}/: no README.md"


def check_dead(files):
    """Headers nobody includes and scripts nobody names."""
    readable = [p for p in files if p.endswith(CODE + (".txt", ".cmake", ".sh", ".py", ".md", ".yml", ".json")) or p == ".ci/run"]
    texts = {path: read(path) for path in readable if os.path.getsize(os.path.join(ROOT, path)) < 1 << 18}
    included = {name for text in texts.values() for name in re.findall(r'#include "([^"]+)"', text)}
    for path in files:
        name = os.path.basename(path)
        if path.endswith((".h", ".cuh")):
            if path not in included:
                yield f"{path}: nothing includes it"
        elif path.endswith((".sh", ".py")) and not name.startswith(("test_", "conftest", "__init__")):
            imported = re.compile(rf"\b(from|import) {re.escape(name.rsplit('.', 1)[0])}\b")
            if not any(name in text or (other.endswith(".py") and imported.search(text)) for other, text in texts.items() if other != path):
                yield f"{path}: nothing names it"


def check_co_await(path, text):
    if not path.endswith(".cc"):
        return
    text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', lambda m: " " * len(m.group()), text)
    for match in re.finditer(r"\bco_await\b", text):
        depth, end = 0, match.end()
        while end < len(text) and not (depth <= 0 and text[end] in ";)"):
            depth += (text[end] in "({[") - (text[end] in ")}]")
            end += 1
        expression = text[match.end():end]
        if re.search(r"(?:^|[(,=\s])\[(?!\s*\]|\s*&\s*\])[^\[\]]*\]\s*(?:\(|\{|mutable)", expression) or re.search(r"(?:\w\s*|[(,]\s*)\{", expression):
            yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: temporary inside co_await; give it a name first"


def findings(files):
    for path in files:
        if path.endswith(CODE + (".proto", ".sh", ".py", ".md", ".txt", ".cmake", ".yml")):
            text = read(path)
            for check in (check_head, check_words, check_includes, check_links, check_co_await):
                yield from check(path, text)
    yield from check_function_length(files)
    yield from check_readmes(files)
    yield from check_dead(files)


def main():
    files = tracked_files()
    if "--update" in sys.argv[1:]:
        with open(os.path.join(ROOT, "tests/tidy/long_functions.txt"), "w", encoding="utf-8") as out:
            out.write("# Functions longer than 70 lines today: path, name, lines. They may shrink, not grow; new ones are findings.\n")
            for key, length in sorted(long_functions(files).items()):
                out.write(f"{key} {length}\n")
        return 0
    found = list(findings(files))
    print("\n".join(found))
    print(f"tidy: {len(files)} files, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
