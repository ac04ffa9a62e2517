"""Five processes x {KILL, STOP} x {idle, decoding, long chunk}: what the others do, as one table.

After a worker or a row service: /health is 503 with the reason, each stream has had one error event and only right tokens before
it, the surviving workers are back in IDLE with their weights. After the gateway: its streams end and the workers are back in IDLE.
All within limits that follow from the settings. Then the part goes on or is started again, and the cluster answers as before.
"""

import random
import signal
import time

from five_processes import FiveProcesses, Stream, wait_until
from test_local_cluster import SEED

WORKER_SILENCE_MS = 800
GATEWAY_SILENCE_MS = 1500
# What comes on top of a silence: the period of the watchers, a failed call, and a machine that has other things to do.
SLACK_SECONDS = 2.5
LIMIT_503 = 1.0 + SLACK_SECONDS + 1e-3 * WORKER_SILENCE_MS  # 1 s: row waits and their heartbeats
LIMIT_IDLE = SLACK_SECONDS + 1e-3 * GATEWAY_SILENCE_MS
assert LIMIT_503 <= 5
STREAM_END_SECONDS = 10
BACK_SECONDS = 60

STORY = "tell me a story"
LONG = "one two three four five " * 2000
LOADS = ["idle", "decoding", "long chunk"]


class Table:
    def __init__(self):
        self.rows = []
        self.problems = []

    def check(self, holds, cell, what):
        if not holds:
            self.problems.append(f"{' '.join(cell)}: {what}")

    def text(self):
        titles = ("process", "signal", "while", "seconds to 503", "error events per stream", "the others afterwards")
        rows = [titles, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
        return "\n".join("  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip() for row in rows)


def start_load(cluster, load):
    if load == "idle":
        return []
    streams = [Stream(cluster, STORY), Stream(cluster, "count from 1 to 30")]
    for stream in streams:
        stream.wait_tokens(20)
    if load == "long chunk":
        streams.append(Stream(cluster, LONG, max_tokens=50))
        wait_until(lambda: cluster.status()["requests"]["prefilling"] > 0, 20, "the long prompt is being prefilled")
    return streams


def worker_state(part):
    try:
        reply = part.call("Status")
    except Exception as error:  # not there, or stopped
        return type(error).__name__
    kept = "weights kept" if reply["weights_digest"] else "NO WEIGHTS"
    return f"{reply['state'].removeprefix('WORKER_')}, {kept}"


def wait_survivors(cluster, victim, table, cell, since):
    """The states of the others, and when the last worker was back in IDLE."""
    said = []
    for part in cluster.parts():
        if part is victim or part is cluster.gateway:
            continue
        if part.kind == "engram_service":
            said.append(f"{part.name} {'SERVING' if part.call('Status') else '?'}")
            continue
        seen = set()

        def idle(part=part, seen=seen):
            seen.add(worker_state(part))
            return "IDLE, weights kept" in seen

        while not idle() and time.monotonic() - since < BACK_SECONDS:
            time.sleep(0.02)
        took = time.monotonic() - since
        limit = LIMIT_IDLE if victim is cluster.gateway else LIMIT_503 + SLACK_SECONDS
        table.check("IDLE, weights kept" in seen and took < limit, cell, f"{part.name} was {seen} for {took:.2f} s, limit {limit} s")
        said.append(f"{part.name} IDLE, weights kept after {took:.2f} s")
    return said


def check_streams(streams, story, events, table, cell):
    for stream in streams:
        stream.finish(STREAM_END_SECONDS)
        table.check(len(stream.errors) == events, cell, f"{len(stream.errors)} error events {stream.errors}, end {stream.end}")
        if stream.body["messages"][0]["content"] == STORY:
            table.check(stream.tokens == story[: len(stream.tokens)], cell, "a token differs from the undisturbed stream")
    return ", ".join(str(len(stream.errors)) for stream in streams) or "no stream"


def fault_of_a_served_part(cluster, victim, number, streams, story, table, cell):
    start = time.monotonic()
    victim.signal(number)
    while cluster.health()[0] == 200 and time.monotonic() - start < BACK_SECONDS:
        time.sleep(0.01)
    to_503 = time.monotonic() - start
    status, body = cluster.health()
    table.check(status == 503 and to_503 < LIMIT_503, cell, f"/health {status} after {to_503:.2f} s, limit {LIMIT_503}")
    table.check(status == 503 and bool(body.get("reason")), cell, f"no reason in {body}")
    others = wait_survivors(cluster, victim, table, cell, start)
    events = check_streams(streams, story, 1, table, cell)
    others.append(f"gateway {body.get('state')}")
    return f"{to_503:.2f}", events, others


def fault_of_the_gateway(cluster, number, streams, story, table, cell):
    start = time.monotonic()
    cluster.gateway.signal(number)
    others = wait_survivors(cluster, cluster.gateway, table, cell, start)
    if number == signal.SIGKILL:
        table.check(cluster.health()[0] is None, cell, "somebody answers /health")
        events = check_streams(streams, story, 0, table, cell)
        return "nobody answers", f"connection ends ({events})" if streams else events, others
    table.check(cluster.health(timeout=0.3)[0] is None, cell, "a stopped process answers /health")
    back = time.monotonic()
    cluster.gateway.signal(signal.SIGCONT)
    wait_until(lambda: cluster.health()[0] is not None, BACK_SECONDS, "it goes on")
    if not streams:  # nothing shows when it noticed but its own count
        wait_until(lambda: cluster.status()["epochs_ended"] > 0, BACK_SECONDS, "it sees that the epoch is over")
        return f"no answer; {time.monotonic() - back:.2f} after CONT", "no stream", others
    events = check_streams(streams, story, 1, table, cell)
    return f"no answer; {time.monotonic() - back:.2f} after CONT", f"{events} after CONT", others


def bring_back(cluster, victim, number):
    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
    else:
        victim.end()
        victim.start()
    cluster.wait_ready(BACK_SECONDS)


def one_cell(cluster, victim, number, load, story, rng, table):
    cell = (victim.name, number.name[3:], load)
    streams = start_load(cluster, load)
    time.sleep(rng.random() * 0.2)
    if victim is cluster.gateway:
        result = fault_of_the_gateway(cluster, number, streams, story, table, cell)
    else:
        result = fault_of_a_served_part(cluster, victim, number, streams, story, table, cell)
    table.rows.append((*cell, result[0], result[1], "; ".join(result[2])))
    bring_back(cluster, victim, number)
    again = Stream(cluster, STORY, max_tokens=40)
    again.finish(60)
    table.check(again.tokens == story[:40], cell, "another answer after the fault")


def test_table(tmp_path):
    print("seed", SEED)
    rng = random.Random(SEED)
    silences = ["--worker-silence-ms", str(WORKER_SILENCE_MS), "--gateway-silence-ms", str(GATEWAY_SILENCE_MS)]
    table = Table()
    with FiveProcesses(tmp_path, flags={"gateway": silences}) as cluster:
        cluster.start()
        undisturbed = Stream(cluster, STORY, max_tokens=400)
        undisturbed.finish(60)
        story = undisturbed.tokens
        assert len(story) == 400
        for victim in cluster.parts():
            for number in (signal.SIGKILL, signal.SIGSTOP):
                for load in LOADS:
                    one_cell(cluster, victim, number, load, story, rng, table)
    print(f"limits: 503 after {LIMIT_503} s, IDLE without a gateway after {LIMIT_IDLE} s")
    print(table.text())
    assert len(table.rows) == 30 and all(value for row in table.rows for value in row)
    assert not table.problems, "\n".join(table.problems)
