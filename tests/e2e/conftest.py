"""One cluster for all conversations: the five programs on this machine, started by local_cluster on port 0.

TWINSPARK_URL names a running one instead (then tests that look into the processes' run folder are skipped).
TWINSPARK_BIN is the folder of the programs.
"""

import json
import os
import subprocess
import time
import urllib.request

import openai
import pytest

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("TWINSPARK_BIN", os.path.join(CHECKOUT, "build/release/bin"))
MODEL_DIR = os.path.join(CHECKOUT, "deploy/demo_model")
MODEL_ID = "DeepSeek-v4.1-Flash-EXL3"
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


class Cluster:
    """A running gateway by its URL, and the run folder of its processes where there is one."""

    def __init__(self, url, run_dir=None):
        self.url = url
        self.run_dir = run_dir

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return reply.read().decode()

    def status(self):
        return json.loads(self.get("/status"))

    def post(self, path, body):
        """Status and JSON of an answer, errors too."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def in_use(self):
        status = self.status()
        workers = [(worker["slots_used"], worker["pages_used"]) for worker in status["workers"]]
        return status["slots"]["used"], status["pages"]["used"], workers

    def is_idle(self):
        slots, pages, workers = self.in_use()
        return slots == 0 and pages == 0 and all(used == (0, 0) for used in workers)

    def wait_idle(self, seconds):
        """Seconds until every slot and page was free again."""
        start = time.monotonic()
        while not self.is_idle():
            if time.monotonic() - start > seconds:
                pytest.fail(f"not idle after {seconds} s: {self.in_use()}")
            time.sleep(0.02)
        return time.monotonic() - start


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if "TWINSPARK_URL" in os.environ:
        yield Cluster(os.environ["TWINSPARK_URL"].rstrip("/"))
        return
    run_dir = tmp_path_factory.mktemp("cluster")
    up = subprocess.run([f"{BIN}/local_cluster", "up", "--run-dir", str(run_dir), "--port", "0", "--model", MODEL_DIR],
                        capture_output=True, text=True, timeout=180)
    assert up.returncode == 0, up.stdout + up.stderr
    with open(run_dir / "cluster.json") as file:
        port = json.load(file)["port"]
    yield Cluster(f"http://127.0.0.1:{port}", run_dir)
    subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(run_dir)], check=True, timeout=60)


@pytest.fixture(scope="session")
def client(cluster):
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", timeout=120, max_retries=0)


@pytest.fixture(scope="session")
def golden():
    with open(os.path.join(MODEL_DIR, "golden.json")) as file:
        return json.load(file)["cases"]
