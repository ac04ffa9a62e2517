"""A worker that is told to stop (SIGTERM): at once when nobody waits for a token, after its streams otherwise; back by hand, it is
taken again."""

import signal
import time

from five_processes import FiveProcesses, Stream, wait_until

AT_ONCE_SECONDS = 5  # DRAIN_SECONDS is 20
QUESTION = "tell me a story"


def test_an_idle_worker_goes_at_once(tmp_path):
    with FiveProcesses(tmp_path) as cluster:
        cluster.start()
        first = Stream(cluster, QUESTION, max_tokens=8)
        first.finish(60)
        assert first.end == "done" and not first.errors, (first.end, first.errors)
        worker = cluster.workers[1]
        start = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.exit_code(AT_ONCE_SECONDS) == 0, worker.log()
        print(f"gone after {time.monotonic() - start:.2f} s")
        wait_until(lambda: cluster.health()[0] == 503, AT_ONCE_SECONDS, "/health is 503")
        assert "the worker stops (signal 15): no sequence is open" in cluster.gateway.log(), cluster.gateway.log()
        worker.end()
        worker.start()
        cluster.wait_ready()
        second = Stream(cluster, QUESTION, max_tokens=8)
        second.finish(60)
        assert second.tokens == first.tokens and not second.errors


def test_a_busy_worker_finishes_its_stream(tmp_path):
    with FiveProcesses(tmp_path) as cluster:
        cluster.start()
        stream = Stream(cluster, QUESTION, max_tokens=400)
        stream.wait_tokens(10)
        worker = cluster.workers[1]
        worker.signal(signal.SIGTERM)
        wait_until(lambda: "state=DRAINING" in worker.log(), AT_ONCE_SECONDS, "the worker drains")
        stream.finish(60)
        assert stream.end == "done" and not stream.errors and len(stream.tokens) == 400, (stream.end, stream.errors, len(stream.tokens))
        assert worker.exit_code(AT_ONCE_SECONDS) == 0, worker.log()
