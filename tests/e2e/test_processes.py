"""What can be seen of the processes while they serve: rows through shared memory, health, metrics, gRPC reflection."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import pytest

from conftest import MODEL_ID, OFF
from reflection import ReflectedServer

# Every method of the two services, with a request when it changes nothing and answers once.
WORKER_METHODS = {"Hello": {}, "Status": {}, "PrepareGroup": None, "Configure": None, "Steps": None, "Drain": None, "Reset": None}
ROW_SERVICE_METHODS = {"Hello": {"protocol_version": 1}, "Status": {}, "Canary": {}, "Gather": {"sequences": [{"tokens": [5, 6, 7]}]},
                       "Prefetch": None, "Drain": None, "Verify": None, "Reload": None}


@contextlib.contextmanager
def reflected(address):
    server = ReflectedServer(address)
    try:
        yield server
    finally:
        server.close()


def row_services(cluster):
    return [worker["engram"]["endpoint"] for worker in cluster.status()["workers"]]


def engram_status(address):
    with reflected(address) as server:
        service = next(name for name in server.services() if "ngram" in name)
        return server.call(f"{service}/Status")


def test_rows_come_through_shared_memory_only(cluster, client):
    """Gather is for tools: one call of it during the chats fails this test."""
    before = [engram_status(address) for address in row_services(cluster)]
    for question in ("What is the capital of France?", "count from 1 to 20"):
        client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": question}], max_tokens=40, extra_body=OFF)
    after = [engram_status(address) for address in row_services(cluster)]
    for worker in cluster.status()["workers"]:
        assert worker["engram"]["transport"] == "shm", worker
        assert worker["engram"]["errors"] == 0
    for first, second in zip(before, after):
        assert int(second["shm_requests"]) > int(first["shm_requests"])
        assert second["rpc_gathers"] == first["rpc_gathers"], "rows were asked for over gRPC"


@pytest.mark.parametrize("kind, expected", [("worker", WORKER_METHODS), ("row service", ROW_SERVICE_METHODS)])
def test_read_only_methods_by_reflection(cluster, kind, expected):
    """Every gRPC service lists its methods to a client that has no .proto file, and answers health and the methods that change nothing."""
    workers = [worker["endpoint"] for worker in cluster.status()["workers"]]
    for address in workers if kind == "worker" else row_services(cluster):
        with reflected(address) as server:
            names = server.services()
            assert "grpc.health.v1.Health" in names
            own = [name for name in names if not name.startswith("grpc.")]
            assert len(own) == 1, names
            assert server.health() == "SERVING"
            methods = server.methods(own[0])
            assert set(methods) == set(expected), "a new method belongs into the table of this test"
            for name, request in expected.items():
                if request is not None:
                    assert server.call(f"{own[0]}/{name}", request), name


def test_the_reflection_client_as_a_command(cluster):
    """As the README shows it."""
    script = os.path.join(os.path.dirname(__file__), "reflection.py")
    for address in [cluster.status()["workers"][0]["endpoint"], row_services(cluster)[0]]:
        listed = subprocess.run([sys.executable, script, address], capture_output=True, text=True, timeout=60, check=True).stdout.split()
        status = next(method for method in listed if method.endswith("/Status"))
        called = subprocess.run([sys.executable, script, address, status], capture_output=True, text=True, timeout=60, check=True).stdout
        assert json.loads(called)


def test_health_live_ready_version(cluster):
    assert json.loads(cluster.get("/health"))["state"] == "READY"
    assert json.loads(cluster.get("/ready"))["status"] == "ok"
    assert json.loads(cluster.get("/live"))["status"] == "alive"
    assert json.loads(cluster.get("/version"))["version"]


def test_status_says_what_is_not_enforced(cluster):
    status = cluster.status()
    assert status["state"] == "READY" and status["divergences"] == 0
    assert any("tools" in line for line in status["not_enforced"])
    assert any("response_format" in line for line in status["not_enforced"])
    assert len(status["workers"]) == 2
    assert len({worker["weights_digest"] for worker in status["workers"]}) == 1


def metric(text, name, **labels):
    """Sum of the series of that name that have the labels."""
    total = 0.0
    for line in text.splitlines():
        match = re.match(r"([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", line)
        if match and match[1] == name and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items()):
            total += float(match[3])
    return total


def wait_until(condition, seconds=5):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def standing_metrics(cluster):
    """Counters are published with the next turn of the engine: reads until two readings of the tokens are equal."""
    texts = [cluster.get("/metrics")]
    cluster.wait_idle(1)

    def stands():
        time.sleep(0.3)
        texts.append(cluster.get("/metrics"))
        return metric(texts[-1], "dsv_generation_tokens_total") == metric(texts[-2], "dsv_generation_tokens_total")

    wait_until(stands)
    return texts[-1]


@pytest.mark.parametrize("prefix", ["dsv_", "vllm:"])
def test_metrics_count_a_request(cluster, client, prefix):
    before = standing_metrics(cluster)
    answer = client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0,
                                            extra_body=OFF)

    def grown(name):
        return metric(cluster.get("/metrics"), prefix + name) - metric(before, prefix + name)

    wait_until(lambda: grown("generation_tokens_total") == answer.usage.completion_tokens)
    wait_until(lambda: grown("prompt_tokens_total") == answer.usage.prompt_tokens)
    wait_until(lambda: grown("time_to_first_token_seconds_count") == 1)
    assert metric(cluster.get("/metrics"), "http_requests_total", handler="/v1/chat/completions", status="2xx") >= 1
