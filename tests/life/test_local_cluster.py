"""Process life of a local cluster: whatever ends first, and whenever, nothing is left behind; and what `up` and `down` promise.

Each test has a run folder of its own and asks for port 0, so tests never meet a cluster somebody works with. Processes are found by
their run folder in the command line and ended by pid.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from five_processes import BIN, CHECKOUT, wait_until
from metrics_catalogue import check_scrape

GONE_SECONDS = 5
SEED = int(os.environ.get("TWINSPARK_SEED", "20261201"))


def cluster_pids(run_dir):
    """Processes of this run folder that are not zombies: pid > command line."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode()
            with open(f"/proc/{name}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if str(run_dir) in command and state != "Z":
            found[int(name)] = command
    return found


def assert_gone(run_dir):
    give_up = time.monotonic() + GONE_SECONDS
    while cluster_pids(run_dir) and time.monotonic() < give_up:
        time.sleep(0.02)
    left = cluster_pids(run_dir)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind after {GONE_SECONDS} s: {left}"


def up(run_dir, *flags, cwd=None, **settings):
    """`up` without a port of its own choice, with these settings in the environment."""
    return subprocess.Popen([f"{BIN}/local_cluster", "up", "--run-dir", str(run_dir), *flags], cwd=cwd, env={**os.environ, **settings},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_up(run_dir, *flags):
    return up(run_dir, "--port", "0", *flags)


def state_of(run_dir):
    with open(run_dir / "cluster.json") as file:
        return json.load(file)


def models_status(run_dir, key=None):
    """HTTP status of /v1/models."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{state_of(run_dir)['port']}/v1/models", headers=headers)
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


def free_ports(count):
    """The first of `count` free ports in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        held = []
        try:
            for port in range(first, first + count):
                held.append(socket.socket())
                held[-1].bind(("127.0.0.1", port))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for each in held:
                each.close()


def finish(process, seconds=120):
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output


def part_pid(run_dir, name):
    for pid, command in cluster_pids(run_dir).items():
        if f"/{name}.port" in command and "supervise" not in command:
            return pid
    return None


@pytest.fixture
def cluster(tmp_path):
    """A cluster that `up` has let go, and its run folder."""
    code, output = finish(start_up(tmp_path))
    assert code == 0, output
    yield tmp_path, output
    subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(tmp_path)], check=True, timeout=60)
    assert_gone(tmp_path)


def test_smoke_answers_and_leaves_nothing(tmp_path):
    code, output = finish(start_up(tmp_path, "--smoke"))
    assert code == 0, output
    assert re.search(r"^323$", output, re.M), output
    assert "TTFT" in output
    assert_gone(tmp_path)


def test_tp1(tmp_path):
    code, output = finish(start_up(tmp_path, "--smoke", "--tp", "1"))
    assert code == 0 and re.search(r"^323$", output, re.M), output
    assert_gone(tmp_path)


def test_up_leaves_it_running_and_a_second_up_uses_it(cluster):
    run_dir, output = cluster
    assert "curl" in output and "OpenAI" in output
    before = sorted(cluster_pids(run_dir))
    assert len(before) == 6, cluster_pids(run_dir)
    start = time.monotonic()
    code, second = finish(subprocess.Popen([f"{BIN}/local_cluster", "up", "--run-dir", str(run_dir)],
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    assert code == 0 and "already serves" in second, second
    assert time.monotonic() - start < 15
    assert sorted(cluster_pids(run_dir)) == before
    status = subprocess.run([f"{BIN}/local_cluster", "status", "--json", "--run-dir", str(run_dir)], capture_output=True, text=True, timeout=10)
    assert status.returncode == 0, status.stdout
    assert json.loads(status.stdout)["state"] == "READY"


def test_changed_settings_replace_the_cluster_and_its_keys_hold(cluster):
    run_dir, _ = cluster
    first = state_of(run_dir)
    keys = run_dir / "keys.txt"
    keys.write_text("# team A\nsecret-1\n")
    asked = {"cwd": run_dir, "API_KEY_FILE": "keys.txt", "LISTEN_ADDR": "0.0.0.0"}

    code, output = finish(up(run_dir, **asked))
    assert code == 0 and "API_KEY_FILE, LISTEN_ADDR changed" in output, output
    assert "Authorization: Bearer ONE_OF_YOUR_KEYS" in output and "one of your keys" in output
    second = state_of(run_dir)
    assert second["supervisor_pid"] != first["supervisor_pid"] and second["port"] == first["port"]
    assert "secret" not in json.dumps(second)
    assert [models_status(run_dir, key) for key in (None, "# team A", "secret-1")] == [401, 401, 200]

    code, output = finish(up(run_dir, **asked))
    assert code == 0 and "already serves" in output, output
    assert state_of(run_dir) == second

    keys.write_text("secret-2\n")  # the same path
    code, output = finish(up(run_dir, **asked))
    assert code == 0 and ": API_KEY_FILE changed" in output, output
    assert [models_status(run_dir, key) for key in ("secret-1", "secret-2")] == [401, 200]


@pytest.mark.parametrize("settings, word", [
    ({"API_KEY_FILE": "no_such_keys.txt"}, "no_such_keys.txt"),
    ({"WORKERS": "127.0.0.1:1"}, "WORKERS"),
    ({"METRICS_ADDR": "127.0.0.1:0"}, "METRICS_ADDR"),
    ({"MAX_NUM_SEQS": "many"}, "MAX_NUM_SEQS"),
    ({"LISTEN_ADDR": "everywhere"}, "LISTEN_ADDR"),
])
def test_a_start_that_cannot_work_is_refused_by_name(tmp_path, settings, word):
    code, output = finish(up(tmp_path, "--port", "0", **settings))
    assert code == 78 and word in output, output
    assert_gone(tmp_path)


def test_a_start_that_cannot_work_leaves_the_running_cluster(cluster):
    run_dir, _ = cluster
    before = sorted(cluster_pids(run_dir))
    code, output = finish(up(run_dir, API_KEY_FILE="no_such_keys.txt"))
    assert code == 78 and "no_such_keys.txt" in output, output
    code, output = finish(up(run_dir, MODEL_DIR="no_such_model"))
    assert code == 69 and "no_such_model/config.json" in output and "stays" in output, output
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        code, output = finish(up(run_dir, "--port", port))
        assert code == 69 and port in output and "stays" in output, output
    assert sorted(cluster_pids(run_dir)) == before
    assert models_status(run_dir) == 200


def test_port_model_and_metrics_address_of_the_environment(tmp_path):
    port = free_ports(6)
    (tmp_path / "model").symlink_to(os.path.join(CHECKOUT, "deploy/demo_model"))
    code, output = finish(up(tmp_path, cwd=tmp_path, PORT=str(port), MODEL_DIR="model", METRICS_ADDR=f"127.0.0.1:{port + 1}"))
    try:
        assert code == 0 and f"http://127.0.0.1:{port}/v1/" in output, output
        for offset, program in enumerate(["gateway", "engram_service", "shard_worker", "engram_service", "shard_worker"]):
            with urllib.request.urlopen(f"http://127.0.0.1:{port + 1 + offset}/metrics", timeout=10) as reply:
                assert len(check_scrape(program, reply.read().decode())) > 10, offset
        assert f"metrics=127.0.0.1:{port + 2}" in (tmp_path / "supervisor.log").read_text()
    finally:
        subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(tmp_path)], check=True, timeout=60)
        assert_gone(tmp_path)


def test_a_gateway_that_listens_on_one_other_address_is_asked_there(tmp_path):
    address = "127.0.0.2"  # of this machine, and nobody listens on 127.0.0.1
    try:
        code, output = finish(up(tmp_path, "--port", "0", LISTEN_ADDR=address))
        assert code == 0, output
        url = f"http://{address}:{state_of(tmp_path)['port']}"
        assert f"The cluster stays on {url} " in output and f'base_url="{url}/v1"' in output, output
        status = subprocess.run([f"{BIN}/local_cluster", "status", "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=30)
        assert status.returncode == 0 and "READY" in status.stdout, status.stdout
        code, output = finish(up(tmp_path, LISTEN_ADDR=address))
        assert code == 0 and "already serves" in output, output
    finally:
        subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(tmp_path)], check=True, timeout=60)
        assert_gone(tmp_path)


def test_down_without_a_cluster_says_so(tmp_path):
    down = subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=10)
    assert down.returncode == 0 and "no cluster" in down.stdout


def test_a_taken_port_is_named(cluster, tmp_path_factory):
    run_dir, _ = cluster
    with open(run_dir / "cluster.json") as file:
        port = json.load(file)["port"]
    other = tmp_path_factory.mktemp("other")
    process = subprocess.Popen([f"{BIN}/local_cluster", "up", "--run-dir", str(other), "--port", str(port)],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    code, output = finish(process)
    assert code == 69 and "gateway" in output and "78" in output and str(port) in output, output
    assert_gone(other)


@pytest.mark.parametrize("name", ["engram_service-0", "shard_worker-1", "gateway"])
def test_a_part_that_dies_before_ready_ends_the_start(tmp_path, name):
    process = start_up(tmp_path)
    wait_until(lambda: part_pid(tmp_path, name), 30, f"{name} started")
    os.kill(part_pid(tmp_path, name), signal.SIGKILL)
    code, output = finish(process)
    if code == 0:  # it was ready and answered before the signal arrived
        pytest.skip("the cluster was up before the signal arrived")
    assert code == 69 and f"{name}.log" in output, output
    assert_gone(tmp_path)


def test_whatever_moment_up_is_ended(tmp_path):
    """SIGINT, SIGTERM and SIGKILL at random moments of the start."""
    rng = random.Random(SEED)
    print("seed", SEED)
    for trial in range(12):
        run_dir = tmp_path / str(trial)
        run_dir.mkdir()
        number = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL][trial % 3]
        process = start_up(run_dir)
        time.sleep(rng.random() * 2.0)
        released = process.poll() is not None
        if not released:
            process.send_signal(number)
        finish(process)
        if released or (run_dir / "cluster.json").exists() and process.returncode == 0:
            subprocess.run([f"{BIN}/local_cluster", "down", "--run-dir", str(run_dir)], check=True, timeout=60)
        assert_gone(run_dir)


def test_parts_follow_a_killed_supervisor_even_when_stopped(tmp_path):
    code, output = finish(start_up(tmp_path))
    assert code == 0, output
    worker = part_pid(tmp_path, "shard_worker-0")
    os.kill(worker, signal.SIGSTOP)
    with open(tmp_path / "cluster.json") as file:
        os.kill(json.load(file)["supervisor_pid"], signal.SIGKILL)
    assert_gone(tmp_path)


def test_a_stopped_part_is_ended_and_named(cluster):
    run_dir, _ = cluster
    worker = part_pid(run_dir, "shard_worker-1")
    os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: worker not in cluster_pids(run_dir), 15, "the stopped worker was ended")
    log = (run_dir / "supervisor.log").read_text()
    assert "shard_worker-1" in log and "was stopped" in log, log


def test_a_part_that_dies_is_named(cluster):
    run_dir, _ = cluster
    worker = part_pid(run_dir, "shard_worker-1")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: "shard_worker-1 was ended by signal 9" in (run_dir / "supervisor.log").read_text(), 15, "the supervisor says so")
