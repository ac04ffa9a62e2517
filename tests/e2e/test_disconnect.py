"""Clients that leave: slot and pages are free within a second, whatever the request was doing."""

import json
import subprocess
import time

import pytest

from conftest import MODEL_ID

FREE_SECONDS = 1.0


def start_curl(cluster, body):
    return subprocess.Popen(["curl", "-sN", "--max-time", "60", cluster.url + "/v1/chat/completions", "-H", "Content-Type: application/json",
                             "-d", json.dumps({"model": MODEL_ID, **body})], stdout=subprocess.PIPE)


def wait_running(cluster):
    give_up = time.monotonic() + 30
    while cluster.status()["requests"]["running"] == 0:
        assert time.monotonic() < give_up, "the request never ran"
        time.sleep(0.005)


LONG_ANSWER = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 4000, "ignore_eos": True}
LONG_PROMPT = {"messages": [{"role": "user", "content": "one two three four five " * 2000}], "max_tokens": 10}


@pytest.mark.parametrize("body", [
    pytest.param({**LONG_ANSWER, "stream": True}, id="streaming"),
    pytest.param({**LONG_ANSWER, "stream": False}, id="nothing_written"),
    pytest.param({**LONG_PROMPT, "stream": True}, id="middle_of_a_long_prompt"),
])
def test_a_killed_client_frees_everything(cluster, body):
    cluster.wait_idle(FREE_SECONDS)
    curl = start_curl(cluster, body)
    try:
        wait_running(cluster)
        if body["stream"] and body is not LONG_PROMPT and body["max_tokens"] > 10:
            assert curl.stdout.readline().startswith(b"data: ")
    finally:
        curl.kill()
        curl.wait()
    taken = cluster.wait_idle(FREE_SECONDS)
    print(f"free after {taken:.3f} s")


def test_many_clients_leave_and_others_stay(cluster, client):
    """Half of sixteen streams are cut; the others get exactly what they get alone."""
    body = {"messages": [{"role": "user", "content": "tell me a story"}], "temperature": 0, "stream": False,
            "chat_template_kwargs": {"enable_thinking": False}}
    _, alone = cluster.post("/v1/chat/completions", {"model": MODEL_ID, **body})
    stay = [start_curl(cluster, body) for _ in range(8)]
    leave = [start_curl(cluster, {**LONG_ANSWER, "stream": True}) for _ in range(8)]
    for curl in leave:
        curl.stdout.readline()
        curl.kill()
        curl.wait()
    for curl in stay:
        text, _ = curl.communicate(timeout=60)
        assert json.loads(text)["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    cluster.wait_idle(FREE_SECONDS)
