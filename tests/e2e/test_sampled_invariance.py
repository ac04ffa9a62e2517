"""Sampled answers with a seed do not depend on the draft depth, on what else runs, or on the process that computes them: other
clusters with k = 0 and 5, and the first one under load, give the token ids that it gives alone with k = 3."""

import json
import os
import subprocess
import threading

import pytest

from conftest import BIN, MODEL_DIR, MODEL_ID, Cluster

# Raw text that the demo model was not trained on: its distributions are wide open.
PROMPTS = ["The purple elephant sang about", "Yesterday nobody saw the", "import numpy as"]
SETTINGS = [{"temperature": 1.0, "top_p": 0.95}, {"temperature": 2.0, "top_p": 1.0}, {"temperature": 1.5, "top_k": 20, "min_p": 0.01},
            {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2}]


def answers(cluster):
    """Token ids of every prompt with every setting."""
    found = {}
    for prompt in PROMPTS:
        for i, setting in enumerate(SETTINGS):
            status, reply = cluster.post("/v1/completions", {"model": MODEL_ID, "prompt": prompt, "max_tokens": 30, "seed": 1000 + i,
                                                              "return_token_ids": True, **setting})
            assert status == 200, reply
            found[prompt, i] = reply["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def alone(cluster):
    return answers(cluster)


def test_they_differ(alone):
    """Otherwise the tests below would say nothing about sampling."""
    assert len({tuple(ids) for ids in alone.values()}) == len(PROMPTS) * len(SETTINGS)


def test_under_load(cluster, alone):
    stop = threading.Event()

    def load():
        while not stop.is_set():
            cluster.post("/v1/chat/completions", {"model": MODEL_ID, "messages": [{"role": "user", "content": "tell me a story"}],
                                                  "max_tokens": 40, "temperature": 1.5})

    threads = [threading.Thread(target=load) for _ in range(5)]
    for thread in threads:
        thread.start()
    try:
        assert answers(cluster) == alone
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("drafts", [0, 3, 5])
def test_other_clusters(cluster, alone, drafts, tmp_path):
    """k = 3 once more is the restart."""
    if cluster.run_dir is None and not os.path.exists(f"{BIN}/local_cluster"):
        pytest.skip("no programs to start another cluster with")
    up = subprocess.run([f"{BIN}/local_cluster", "up", "--run-dir", str(tmp_path), "--port", "0", "--model", MODEL_DIR],
                        capture_output=True, text=True, timeout=180, env={**os.environ, "DSPARK_TOKENS": str(drafts)})
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        with open(tmp_path / "cluster.json") as file:
            other = Cluster(f"http://127.0.0.1:{json.load(file)['port']}", tmp_path)
        assert other.status()["limits"]["drafts"] == drafts
        assert answers(other) == alone
    finally:
        subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(tmp_path)], check=True, timeout=60)
