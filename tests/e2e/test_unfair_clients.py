"""Clients that take more than their share: endless prompts that can never run, and streams that nobody reads. Others do not wait."""

import json
import os
import socket
import subprocess
import threading
import urllib.parse

import pytest

from conftest import BIN, MODEL_DIR, MODEL_ID, Cluster

CHAT = "/v1/chat/completions"
MEGABYTES = [" " * (12 << 20), "q" * (6 << 20), "ab 1" * (2 << 20)]


def test_endless_prompts_do_not_hold_up_long_ones(cluster):
    """Eight requests whose prompts are long enough to be prepared off the connection's thread, while three clients send bodies of
    megabytes one after the other: each of those is refused, and counted."""
    refused = []
    done = threading.Event()

    def flood(text):
        while not done.is_set():
            status, reply = cluster.post(CHAT, {"model": MODEL_ID, "messages": [{"role": "user", "content": text}]})
            refused.append((status, reply["error"]["code"], "maximum context length" in reply["error"]["message"]))

    threads = [threading.Thread(target=flood, args=(text,)) for text in MEGABYTES]
    for thread in threads:
        thread.start()
    try:
        limit = cluster.status()["limits"]["max_context"]
        filler = "word " * 9000  # 45 kB
        body = {"model": MODEL_ID, "prompt": filler, "truncate_prompt_tokens": min(200, limit // 2), "max_tokens": 2, "temperature": 0}
        answers = [None] * 8

        def good(i):
            answers[i] = cluster.post("/v1/completions", body)

        good_threads = [threading.Thread(target=good, args=(i,)) for i in range(8)]
        for thread in good_threads:
            thread.start()
        for thread in good_threads:
            thread.join()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert [status for status, _ in answers] == [200] * 8, answers
    assert len({reply["choices"][0]["text"] for _, reply in answers}) == 1
    assert refused and set(refused) == {(400, "context_length_exceeded", True)}
    assert cluster.status()["state"] == "READY"


@pytest.fixture
def strict_cluster(tmp_path):
    """A cluster of two slots whose clients have a second to take a byte."""
    if not os.path.exists(f"{BIN}/local_cluster"):
        pytest.skip("no programs to start another cluster with")
    up = subprocess.run([f"{BIN}/local_cluster", "up", "--run-dir", str(tmp_path), "--port", "0", "--model", MODEL_DIR], capture_output=True,
                        text=True, timeout=180, env={**os.environ, "SLOW_CLIENT_SECONDS": "1", "MAX_NUM_SEQS": "2"})
    assert up.returncode == 0, up.stdout + up.stderr
    with open(tmp_path / "cluster.json") as file:
        yield Cluster(f"http://127.0.0.1:{json.load(file)['port']}", tmp_path)
    subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(tmp_path)], check=True, timeout=60)


def test_streams_that_nobody_reads_give_their_slots_back(strict_cluster):
    """Both slots are held by streams without a reader, with more output than the kernel keeps for them; the third request gets its
    turn, and the two were dropped, not finished."""
    cluster = strict_cluster
    address = urllib.parse.urlsplit(cluster.url)
    limit = cluster.status()["limits"]["max_context"]
    body = json.dumps({"model": MODEL_ID, "messages": [{"role": "user", "content": "tell me a story"}], "stream": True, "ignore_eos": True,
                       "logprobs": True, "top_logprobs": 20, "max_tokens": limit - 200, "temperature": 0})
    streams = []
    for _ in range(2):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        streams.append(connection)
    try:
        status, reply = cluster.post(CHAT, {"model": MODEL_ID, "messages": [{"role": "user", "content": "What is 17*19?"}], "max_tokens": 8,
                                            "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}})
        assert status == 200 and "323" in reply["choices"][0]["message"]["content"]
        cluster.wait_idle(60)
    finally:
        for connection in streams:
            connection.close()
    ended = [line for line in cluster.get("/metrics").splitlines() if line.startswith("dsv_requests_total")]
    assert any('finish_reason="abort"' in line and line.endswith(" 2") for line in ended), ended
