"""A row service that dies, stands still or comes back under a running cluster: idle and with requests on their way.

Whatever happens to it, the epoch ends soon with a reason that names it, no answer differs from the undisturbed one, the workers
stay the processes they were, and a service that is back is used by the next epoch.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest

from test_local_cluster import BIN, CHECKOUT, SEED, assert_gone, cluster, finish, part_pid, start_up, wait_until  # noqa: F401 (a fixture)

MODEL_DIR = os.path.join(CHECKOUT, "deploy/demo_model")
NOTICED_SECONDS = 5  # the promise is 1 s; a busy machine gets more
BACK_SECONDS = 30
QUESTIONS = ["What is the capital of France?", "What is 17*19?", "count from 1 to 30", "Write a poem about the sea."]


class Gateway:
    def __init__(self, run_dir):
        with open(run_dir / "cluster.json") as file:
            self.url = f"http://127.0.0.1:{json.load(file)['port']}"

    def status(self):
        with urllib.request.urlopen(self.url + "/status", timeout=30) as reply:
            return json.loads(reply.read())

    def state(self):
        return self.status()["state"]

    def ask(self, question, max_tokens=120):
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0,
                "chat_template_kwargs": {"enable_thinking": False}}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())["choices"][0]["message"]["content"]


def command_of(pid):
    """Its command line without the tie to the supervisor."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().decode().rstrip("\0").split("\0")
    tie = words.index("--lifeline-fd")
    return words[:tie] + words[tie + 2:]


@contextlib.contextmanager
def restarted_by_hand(run_dir, command, name, **settings):
    """The same program with the same flags on the port it had, as an operator or a supervisor would start it."""
    address = (run_dir / f"{name}.port").read_text().strip()
    command = list(command)
    command[command.index("--engram-listen") + 1] = address
    with open(run_dir / f"{name}.again.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | settings)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def worker_pids(run_dir):
    return [part_pid(run_dir, f"shard_worker-{rank}") for rank in range(2)]


def epoch_ends_with_reason(run_dir):
    return "row service" in (run_dir / "shard_worker-0.log").read_text().split("epoch ended", 1)[-1].splitlines()[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_idle_cluster_notices_at_once(cluster, number):
    run_dir, _ = cluster
    gateway = Gateway(run_dir)
    expected = gateway.ask(QUESTIONS[0])
    workers = worker_pids(run_dir)
    service = part_pid(run_dir, "engram_service-0")
    command = command_of(service)
    wait_until(lambda: gateway.status()["slots"]["used"] == 0, 10, "idle")
    start = time.monotonic()
    os.kill(service, number)
    wait_until(lambda: "epoch ended" in (run_dir / "shard_worker-0.log").read_text(), NOTICED_SECONDS, "the worker notices")
    print(f"{number.name}: noticed after {time.monotonic() - start:.2f} s")
    assert epoch_ends_with_reason(run_dir), (run_dir / "shard_worker-0.log").read_text()
    wait_until(lambda: gateway.state() != "READY", NOTICED_SECONDS, "the gateway says so without a request")
    if number == signal.SIGSTOP:
        os.kill(service, signal.SIGCONT)
        wait_until(lambda: gateway.state() == "READY", BACK_SECONDS, "used again after it goes on")
        assert gateway.ask(QUESTIONS[0]) == expected
    else:
        with restarted_by_hand(run_dir, command, "engram_service-0"):
            wait_until(lambda: gateway.state() == "READY", BACK_SECONDS, "used again after its restart")
            assert gateway.ask(QUESTIONS[0]) == expected
    assert worker_pids(run_dir) == workers


class Load:
    """Greedy requests from a few threads; every answer must be the one of the undisturbed cluster."""

    def __init__(self, gateway, expected):
        self.gateway = gateway
        self.expected = expected
        self.wrong = []
        self.right = 0
        self.refused = 0
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(index,)) for index in range(3)]
        for thread in self.threads:
            thread.start()

    def run(self, index):
        while not self.stop.is_set():
            question = QUESTIONS[index % len(QUESTIONS)]
            index += 1
            try:
                answer = self.gateway.ask(question)
            except (urllib.error.HTTPError, urllib.error.URLError, OSError):
                with self.lock:
                    self.refused += 1
                time.sleep(0.05)
                continue
            with self.lock:
                if answer == self.expected[question]:
                    self.right += 1
                else:
                    self.wrong.append((question, answer))

    def finish(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def ready_seconds(log):
    """From the first line to `ready` of a service's log."""
    stamps = [re.match(r"\S+T(\d+):(\d+):(\d+\.\d+)Z", line) for line in log.splitlines() if " starting " in line or " ready " in line]
    seconds = [int(m[1]) * 3600 + int(m[2]) * 60 + float(m[3]) for m in stamps if m]
    return seconds[1] - seconds[0] if len(seconds) == 2 else None


def test_restarts_under_load_give_no_wrong_answer(cluster):
    """Killed, stopped and started again with a 2 GiB cache while requests run."""
    run_dir, _ = cluster
    print("seed", SEED)
    rng = random.Random(SEED)
    gateway = Gateway(run_dir)
    expected = {question: gateway.ask(question) for question in QUESTIONS}
    workers = worker_pids(run_dir)
    command = command_of(part_pid(run_dir, "engram_service-1"))
    load = Load(gateway, expected)
    log_path = run_dir / "shard_worker-1.log"
    try:
        with contextlib.ExitStack() as services:
            service = part_pid(run_dir, "engram_service-1")
            for round_number in range(3):
                time.sleep(rng.random() * 0.5)
                ended = log_path.read_text().count("epoch ended")
                if round_number == 1:
                    os.kill(service, signal.SIGSTOP)
                    started = time.monotonic()
                    wait_until(lambda: log_path.read_text().count("epoch ended") > ended, NOTICED_SECONDS, "the epoch ends")
                    print(f"stopped: epoch ended after {time.monotonic() - started:.2f} s")
                os.kill(service, signal.SIGKILL)
                started = time.monotonic()
                wait_until(lambda: log_path.read_text().count("epoch ended") > ended, NOTICED_SECONDS, "the epoch ends")
                print(f"killed: epoch ended after {time.monotonic() - started:.2f} s")
                services.close()
                started = time.monotonic()
                process = services.enter_context(restarted_by_hand(run_dir, command, "engram_service-1", DSV41_CACHE_GIB="2"))
                service = process.pid
                again = run_dir / "engram_service-1.again.log"
                wait_until(lambda: " ready " in again.read_text(), BACK_SECONDS, "the service is ready")
                print(f"ready after {time.monotonic() - started:.2f} s, by its log {ready_seconds(again.read_text())} s")
                wait_until(lambda: gateway.state() == "READY", BACK_SECONDS, "the next epoch")
                print(f"next epoch after {time.monotonic() - started:.2f} s")
                right = load.right
                wait_until(lambda: load.right >= right + 3, 60, "answers after the restart")
                assert "worker attached" in again.read_text()
            load.finish()
    finally:
        load.finish()
    print(f"{load.right} right answers, {len(load.wrong)} wrong, {load.refused} refused meanwhile")
    assert not load.wrong
    assert worker_pids(run_dir) == workers


def test_tables_that_change_under_a_running_cluster_are_not_served(tmp_path):
    """Rows written over in place under load: the epoch ends, nothing is answered from them, nor after the old ones are back with their
    modification time, until a restart."""
    model = tmp_path / "model"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copytree(MODEL_DIR, model)
    table = model / "model-00003-of-00003.safetensors"
    code, output = finish(start_up(run_dir, "--model", str(model)))
    assert code == 0, output
    gateway = Gateway(run_dir)
    load = None
    try:
        expected = {question: gateway.ask(question) for question in QUESTIONS}
        workers = worker_pids(run_dir)
        load = Load(gateway, expected)
        wait_until(lambda: load.right >= 5, 60, "answers before")
        whole = table.read_bytes()
        times = table.stat()
        header = 8 + int.from_bytes(whole[:8], "little")
        other = whole[:header] + bytes(byte if byte & 0x7F == 0x7F else byte ^ 0x80 for byte in whole[header:])
        start = time.monotonic()
        with open(table, "r+b") as file:
            file.write(other)
        ended = [run_dir / f"shard_worker-{rank}.log" for rank in range(2)]
        wait_until(lambda: any("epoch ended" in log.read_text() for log in ended), NOTICED_SECONDS, "the epoch ends")
        print(f"epoch ended after {time.monotonic() - start:.2f} s")
        wait_until(lambda: "not those of the last epoch" in json.dumps(gateway.status()), BACK_SECONDS, "/status says why")
        right = load.right
        assert gateway.state() != "READY"
        time.sleep(1)
        assert load.right == right, "answered while the tables are others"
        with open(table, "r+b") as file:
            file.write(whole)
        os.utime(table, ns=(times.st_atime_ns, times.st_mtime_ns))
        changed = f"{table.stat().st_ctime_ns}"

        def refused():  # after the services have opened the file anew, not while they still tell that it changed
            reason = json.dumps(gateway.status())
            return all(part in reason for part in (f"now {table}: inode", f"was {table}: inode", changed, "restart all workers"))

        wait_until(refused, BACK_SECONDS, "/status says which file differs, in what, and what to do")
        assert gateway.state() != "READY" and load.right == right
        load.finish()
        print(f"{load.right} right answers, {len(load.wrong)} wrong, {load.refused} refused meanwhile")
        assert not load.wrong
        assert worker_pids(run_dir) == workers
        subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(run_dir)], check=True, timeout=60)
        code, output = finish(start_up(run_dir, "--model", str(model)))
        assert code == 0, output
        assert Gateway(run_dir).ask(QUESTIONS[0]) == expected[QUESTIONS[0]]
    finally:
        if load is not None:
            load.finish()
        subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(run_dir)], check=True, timeout=60)
        assert_gone(run_dir)


def test_a_weight_file_that_is_short_for_a_moment_costs_no_worker(tmp_path):
    """Workers that have the weights in memory say what is wrong, stay, and go on when the file is whole again."""
    model = tmp_path / "model"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copytree(MODEL_DIR, model)
    shard = model / "model-00001-of-00003.safetensors"
    code, output = finish(start_up(run_dir, "--model", str(model)))
    assert code == 0, output
    gateway = Gateway(run_dir)
    try:
        expected = gateway.ask(QUESTIONS[0])
        workers = worker_pids(run_dir)
        service = part_pid(run_dir, "engram_service-0")
        whole = shard.read_bytes()
        os.kill(service, signal.SIGSTOP)  # ends the epoch: the workers are configured anew
        os.truncate(shard, len(whole) // 2)
        wait_until(lambda: "epoch ended" in (run_dir / "shard_worker-0.log").read_text(), NOTICED_SECONDS, "the epoch ends")
        os.kill(service, signal.SIGCONT)
        wait_until(lambda: shard.name in json.dumps(gateway.status()), BACK_SECONDS, "/status names the short file")
        time.sleep(2)  # longer than a worker that failed stays
        assert gateway.state() != "READY"
        assert worker_pids(run_dir) == workers
        shard.write_bytes(whole)
        wait_until(lambda: gateway.state() == "READY", BACK_SECONDS, "the next epoch")
        assert gateway.ask(QUESTIONS[0]) == expected
        assert worker_pids(run_dir) == workers
    finally:
        subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(run_dir)], check=True, timeout=60)
        assert_gone(run_dir)
