#!/usr/bin/env python3
"""Breaks one invariance at a time and sees whether exactly the tests that guard it turn red.

    tests/mutants/run.sh [--only NAME] [--list] [--jobs N]

Works on a copy of the committed files in build/mutants/src. Each mutant replaces texts that must occur exactly once (so that the table
cannot rot unnoticed), rebuilds one test program, runs all of it and compares the set of failed tests with the expected one. The
unmutated copy must pass first. Exit code 0 only if every mutant was caught by exactly its tests.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORK = os.path.join(ROOT, "build/mutants")
SOURCE = os.path.join(WORK, "src")
BUILD = os.path.join(WORK, "out")
INVARIANCE = "tests_invariance_test"

# name, what is broken, program, [(file, text, replacement)...], tests expected to fail
MUTANTS = [
    ("order_by_rows", "experts are summed in another order when a step has one row", INVARIANCE,
     [("kernels/moe/moe_cpu.cc", "return ids[a] < ids[b];", "return p.x.rows == 1 ? ids[a] > ids[b] : ids[a] < ids[b];")],
     {"ChunkedIsWhole", "DraftedIsSerial", "PromptLogprobs.ChunkedIsWhole"}),
    ("order_by_thread", "the second thread sums experts in another order", INVARIANCE,
     [("kernels/moe/moe_cpu.cc", "  ParallelRows(launch, p.x.rows, grain, [&](int64_t begin, int64_t end, int) {\n    for (int64_t t = begin; t < end; ++t) {\n      int64_t order[kMaxChosen];",
       "  ParallelRows(launch, p.x.rows, grain, [&](int64_t begin, int64_t end, int thread_idx) {\n    for (int64_t t = begin; t < end; ++t) {\n      int64_t order[kMaxChosen];"),
      ("kernels/moe/moe_cpu.cc", "return ids[a] < ids[b];", "return thread_idx == 1 ? ids[a] > ids[b] : ids[a] < ids[b];")],
     {"AnyNumberOfThreads", "PromptLogprobs.TwoRanksAreOne"}),
    ("one_sum_at_tp1", "one rank sums wo_b and w2 in one go, two ranks in two halves", INVARIANCE,
     [("shard_worker/model/weight_loader.cc", "return world == 1 && CheckTensorParallel(config, 2).ok() ? 2 : 1;", "return world + CheckTensorParallel(config, 2).ok() < 0 ? 2 : 1;")],
     {"TwoRanksAreOne", "PromptLogprobs.TwoRanksAreOne"}),
    ("tie_by_higher_index", "equal index scores are resolved by the higher index", "kernels_indexer_test",
     [("kernels/top_set-inl.h", "(key == dividing && allowed-- <= 0)", "(key == dividing && allowed > 0 && kept-- > set.capacity)")],
     {"EveryModeAgreesWithAFullSort"}),
    ("ring_of_the_window", "the window ring has no room for rows that may be rejected", INVARIANCE,
     [("shard_worker/model/kv_cache.cc", "ring_slots_ = c.sliding_window + limits::kWindowSlack;", "ring_slots_ = c.sliding_window;")],
     {"RejectedRowsLeaveNoTrace", "ConcurrentIsSolo"}),
    ("carry_by_counter", "the open group's raw row is the last one written, not the one of its position", INVARIANCE,
     [("shard_worker/model/step_tables.cc", "-1 - KvCache::CarryRow(s.slot, p));", "-1 - KvCache::CarryRow(s.slot, 0));"),
      ("shard_worker/model/step_tables.cc", "carry_row.push_back(p >= end - KvCache::kCarrySlots ? KvCache::CarryRow(s.slot, p) : -1);",
       "carry_row.push_back(p == end - 1 ? KvCache::CarryRow(s.slot, 0) : -1);")],
     {"RejectedRowsLeaveNoTrace", "DraftedIsSerial", "ConcurrentIsSolo", "TruncatedGoesOnAsIfNeverLonger",
      "InterruptedGoesOnAsIfNeverInterrupted"}),
    ("draft_rows_early", "the draft pass already sees the context row at the anchor, which a rejected draft may have left", INVARIANCE,
     [("shard_worker/model/step_tables.cc", "row.ring_end = first_position;\n      row.step_begin = num_rows;", "row.ring_end = first_position + 1;\n      row.step_begin = num_rows;")],
     {"RejectedRowsLeaveNoTrace", "DraftedIsSerial", "ConcurrentIsSolo", "InterruptedGoesOnAsIfNeverInterrupted"}),
    ("engram_history_per_step", "n-grams begin anew at every step", INVARIANCE,
     [("shard_worker/model/engram_layer.cc", "const int64_t history = std::min<int64_t>(3, s.first_position);", "const int64_t history = std::min<int64_t>(0, s.first_position);")],
     {"ChunkedIsWhole", "RejectedRowsLeaveNoTrace", "DraftedIsSerial", "ConcurrentIsSolo", "TruncatedGoesOnAsIfNeverLonger",
      "InterruptedGoesOnAsIfNeverInterrupted",
      "PromptLogprobs.ChunkedIsWhole", "PromptLogprobs.EqualToThoseOfGeneration", "PromptLogprobs.InCompanyIsAlone", "PromptLogprobs.TwoRanksAreOne"}),
    ("visible_by_chunk", "a row sees the compressed rows of its whole chunk", INVARIANCE,
     [("shard_worker/model/step_tables.cc", "index[ratio].push_back({pages, (p + 1) / ratio});", "index[ratio].push_back({pages, end / ratio});")],
     {"ChunkedIsWhole", "RejectedRowsLeaveNoTrace", "DraftedIsSerial", "ConcurrentIsSolo", "TruncatedGoesOnAsIfNeverLonger",
      "InterruptedGoesOnAsIfNeverInterrupted",
      "PromptLogprobs.ChunkedIsWhole", "PromptLogprobs.EqualToThoseOfGeneration", "PromptLogprobs.InCompanyIsAlone", "PromptLogprobs.TwoRanksAreOne"}),
    ("noise_by_row", "the noise of a draw is keyed by the row of the step, not by the position", INVARIANCE,
     [("shard_worker/model/sequence_state.cc", "row.position = static_cast<uint32_t>(position);", "row.position = static_cast<uint32_t>(drafted.size() + 0 * static_cast<size_t>(position));")],
     {"RejectedRowsLeaveNoTrace", "DraftedIsSerial", "ConcurrentIsSolo", "TruncatedGoesOnAsIfNeverLonger",
      "InterruptedGoesOnAsIfNeverInterrupted"}),
    ("copy_rounded", "the f16 copy of a weight differs in its last bit", INVARIANCE,
     [("kernels/exl3/exl3_weights.cc", "ToF16(values[i]).bits;", "static_cast<uint16_t>(ToF16(values[i]).bits ^ (i == 5 ? 1 : 0));")],
     {"DecodedCopyIsTheTrellis"}),
    ("truncate_keeps_ids", "taking tokens back leaves them in the sequence", INVARIANCE,
     [("shard_worker/model/sequence_state.cc", "if (num_ids >= static_cast<int64_t>(ids.size())) return;", "if (num_ids >= 0) return;")],
     {"TruncatedGoesOnAsIfNeverLonger"}),
    ("rows_of_others", "a row's window within its step begins at the first row of the step", INVARIANCE,
     [("shard_worker/model/step_tables.cc", "row.step_begin = s.row_begin + std::max<int64_t>(0, first_key - a);", "row.step_begin = std::max<int64_t>(0, first_key - a);")],
     {"ConcurrentIsSolo", "PromptLogprobs.InCompanyIsAlone"}),
]


def copy_tree():
    """The committed files: what somebody is writing just now is not what is tested."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    os.makedirs(SOURCE)
    archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], capture_output=True, check=True).stdout
    # -m: newer than the objects of the last mutant of the run before, which else would stay.
    subprocess.run(["tar", "-xm", "-C", SOURCE], input=archive, check=True)


def build(program, jobs):
    done = subprocess.run(["cmake", "--build", BUILD, "--target", program, "-j", str(jobs)], capture_output=True, text=True)
    return done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def short(name):
    """Names as in the table: those of prompt_logprobs_test.cc with their suite, for some are called as others."""
    suite, test = name.split(".")
    return f"PromptLogprobs.{test}" if suite == "PromptLogprobsTest" else test


def failed_tests(program):
    """Names of failed tests; a crash counts as the failure of the test that ran."""
    done = subprocess.run([os.path.join(BUILD, "bin", program)], capture_output=True, text=True, timeout=1800)
    failed = {short(name) for name in re.findall(r"^\[  FAILED  \] (\w+\.\w+)", done.stdout, re.M)}
    if done.returncode not in (0, 1):
        running = re.findall(r"^\[ RUN      \] (\w+\.\w+)", done.stdout, re.M)
        failed.add(short(running[-1]) if running else "start")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one mutant by name")
    parser.add_argument("--list", action="store_true", help="print the table and leave")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.list:
        for name, what, program, _, expected in MUTANTS:
            print(f"| `{name}` | {what} | {', '.join(sorted(expected))} |")
        return 0
    chosen = [m for m in MUTANTS if arguments.only in (None, m[0])]
    if not chosen:
        print(f"no mutant '{arguments.only}'; --list names them", file=sys.stderr)
        return 78
    copy_tree()
    configured = subprocess.run(["cmake", "-S", SOURCE, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"], capture_output=True, text=True)
    if configured.returncode:
        print(configured.stdout[-2000:] + configured.stderr[-2000:])
        return 1
    wrong = 0
    for program in sorted({m[2] for m in chosen}):
        good, output = build(program, arguments.jobs)
        failed = failed_tests(program) if good else {"build"}
        print(f"unmutated {program}: {'ok' if not failed else 'FAILED ' + ', '.join(sorted(failed))}", flush=True)
        if failed:
            print(output)
            return 1
    for number, (name, what, program, edits, expected) in enumerate(chosen, 1):
        start = time.monotonic()
        originals = {}
        for path, text, replacement in edits:
            full = os.path.join(SOURCE, path)
            content = open(full, encoding="utf-8").read()
            originals.setdefault(full, content)
            if content.count(text) != 1:
                print(f"{name}: the text occurs {content.count(text)} times in {path}, expected once: {text}")
                return 1
            with open(full, "w", encoding="utf-8") as file:
                file.write(content.replace(text, replacement))
        good, output = build(program, arguments.jobs)
        failed = failed_tests(program) if good else None
        for full, content in originals.items():
            with open(full, "w", encoding="utf-8") as file:
                file.write(content)
        seconds = time.monotonic() - start
        if failed is None:
            print(f"[{number}/{len(chosen)}] {name}: does not compile\n{output}")
            wrong += 1
        elif failed == expected:
            print(f"[{number}/{len(chosen)}] {name}: caught by exactly its tests ({', '.join(sorted(failed))}), {seconds:.0f} s", flush=True)
        else:
            print(f"[{number}/{len(chosen)}] {name}: WRONG ({what}), red and not expected: {sorted(failed - expected)}, "
                  f"expected and green: {sorted(expected - failed)}, {seconds:.0f} s", flush=True)
            wrong += 1
    print(f"{len(chosen) - wrong} of {len(chosen)} mutants caught by exactly their tests")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
