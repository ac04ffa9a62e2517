"""Starts that cannot work: what is wrong and how to mend it in one line, the exit code, within 30 s, nothing left running.

Whole starts go through `local_cluster up`; what only two machines can get wrong (another build, other weights, an epoch that is over)
through the five programs themselves: there the gateway ends and the workers stay IDLE.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import time

import pytest

from five_processes import BIN, MODEL_DIR, FiveProcesses, Part, one_line_with, wait_until
from test_local_cluster import assert_gone, finish, start_up

SECONDS_MAX = 30
IDLE_SECONDS = 40  # a READY worker waits so long at most for a gateway that ended meanwhile
RENDEZVOUS = ["--rendezvous-timeout", "3"]


def say(name, part, code, seconds, line):
    print(f"{name}: {part} exits {code} after {seconds:.1f} s: {line.split(' ', 1)[1]}")


def copy_of_the_model(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(MODEL_DIR, copy, ignore=shutil.ignore_patterns("vectors"))
    return copy


def ends(part, code, *needles):
    """It ended by itself in time, with this code and an ERROR line that has all needles."""
    start = time.monotonic()
    assert part.exit_code(SECONDS_MAX) == code, part.log()
    line = one_line_with(part.log(), *needles)
    say(os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].split(" ")[0], part.name, code, time.monotonic() - start, line)
    return line


def assert_workers_idle(cluster):
    for worker in cluster.workers:
        if worker.process is not None and worker.process.poll() is None:
            wait_until(lambda worker=worker: worker.call("Status")["state"] == "WORKER_IDLE", IDLE_SECONDS, f"{worker.name} IDLE")


# ---- Whole starts --------------------------------------------------------------------------------


def up_fails(run_dir, needles, *flags):
    start = time.monotonic()
    code, output = finish(start_up(run_dir, *flags), seconds=SECONDS_MAX + 30)
    seconds = time.monotonic() - start
    assert code == 69, output
    assert seconds < SECONDS_MAX, f"{seconds:.1f} s\n{output}"
    for needle in needles:
        assert re.search(needle, output), f"no {needle} in:\n{output}"
    assert "nothing is left running" in output, output
    assert_gone(run_dir)
    return output


def test_wrong_model_directory(tmp_path):
    up_fails(tmp_path, ["no_model_here", "must be the checkpoint's directory", "exited with code 65"], "--model", str(tmp_path / "no_model_here"))


def test_a_directory_that_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    up_fails(tmp_path, ["empty", "must be the checkpoint's directory", "exited with code 65"], "--model", str(tmp_path / "empty"))


def test_damaged_tokenizer(tmp_path):
    model = copy_of_the_model(tmp_path)
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    up_fails(tmp_path, ["tokenizer", "exited with code 65"], "--model", str(model))


def test_tokenizer_of_another_model(tmp_path):
    """It parses, but has ids that the weights do not have."""
    model = copy_of_the_model(tmp_path)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    last = max([*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    for i in range(1, 65):
        vocab[f"anotherword{i}"] = last + i
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    up_fails(tmp_path, [r"the tokenizer has \d+ ids, the model \d+; put the tokenizer.json", "exited with code 65"], "--model", str(model))


def test_no_token_map_for_this_tokenizer(tmp_path):
    model = copy_of_the_model(tmp_path)
    os.remove(model / "token_map_i32.bin")
    up_fails(tmp_path, ["token map", "make_token_map", "exited with code 65"], "--model", str(model))


def test_damaged_weights(tmp_path):
    model = copy_of_the_model(tmp_path)
    shard = next(model.glob("model-00001*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    up_fails(tmp_path, [shard.name, "exited with code 65"], "--model", str(model))


def test_full_run_folder(tmp_path):
    run_dir = tmp_path / "full"
    run_dir.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(run_dir)], capture_output=True).returncode != 0:
        pytest.skip("this user cannot mount a small file system")
    try:
        (run_dir / "filler").write_bytes(b"x" * 126976)
        code, output = finish(start_up(run_dir), seconds=SECONDS_MAX)
        assert code == 69, output
        assert re.search(rf"run folder {run_dir}: its file system is full: 0.0 of 0.1 MiB .* make room there or give another", output), output
        assert_gone(run_dir)
    finally:
        subprocess.run(["umount", str(run_dir)], check=True)


# ---- One program at a time -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["engram_service-0", "shard_worker-0", "gateway"])
def test_taken_port(tmp_path, name):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = FiveProcesses(tmp_path)
        part = next(part for part in cluster.parts() if part.name == name)
        part.address = address
        part.flags += ["--workers", "127.0.0.1:1", "--engram-endpoints", "127.0.0.1:1"] if name == "gateway" else []
        with cluster:
            part.start(wait=False)
            ends(part, 78, address, "taken|choose another|in use")
            assert "CANCELLED" not in part.log() and "waiting for workers" not in part.log(), part.log()


def test_a_setting_out_of_range(tmp_path):
    with FiveProcesses(tmp_path) as cluster:
        cluster.gateway.flags += ["--dspark-tokens", "17"]
        cluster.gateway.start(wait=False)
        assert cluster.gateway.exit_code(SECONDS_MAX) == 78
        assert re.search(r"DSPARK_TOKENS.*17", cluster.gateway.log()), cluster.gateway.log()


@pytest.mark.parametrize("name, flags, needles", [
    ("engram_service-0", ["--engram-rank", "2", "--engram-world", "2"], ["ENGRAM_RANK=2 is not below ENGRAM_WORLD=2"]),
    ("engram_service-0", ["--engram-io", "urin"], ["ENGRAM_IO='urin'", "expected auto, uring, threads, inline"]),
    ("shard_worker-0", ["--op-log-dir", "/proc/ops"], ["OP_LOG_DIR='/proc/ops' cannot be made"]),
    ("gateway", ["--log-level", "loud"], ["LOG_LEVEL='loud'", "expected debug, info, warning, error"]),
])
def test_a_setting_that_cannot_be(tmp_path, name, flags, needles):
    cluster = FiveProcesses(tmp_path)
    part = next(part for part in cluster.parts() if part.name == name)
    part.flags += flags
    with cluster:
        part.start(wait=False)
        assert part.exit_code(SECONDS_MAX) == 78, part.log()
        for needle in needles:
            assert needle in part.log(), part.log()


def test_one_worker_for_two_ranks(tmp_path):
    with FiveProcesses(tmp_path) as cluster:
        cluster.gateway.flags += ["--workers", "127.0.0.1:1,127.0.0.1:1", "--engram-endpoints", "127.0.0.1:2,127.0.0.1:2"]
        cluster.gateway.start(wait=False)
        ends(cluster.gateway, 78, "WORKERS='127.0.0.1:1,127.0.0.1:1'", "names 127.0.0.1:1 for rank 0 and for rank 1", "a shard_worker of its own")


# ---- Two machines that do not match ---------------------------------------------------------------


def with_another_build(tmp_path):
    """The worker's program, but for the name of its build."""
    found = subprocess.run([f"{BIN}/shard_worker", "--version"], capture_output=True, text=True).stdout
    build = re.search(r"[0-9a-f]{7,}", found)
    program = open(f"{BIN}/shard_worker", "rb").read()
    assert build and build[0].encode() in program, found
    other = tmp_path / "shard_worker"
    other.write_bytes(program.replace(build[0].encode(), b"f" * len(build[0])))
    other.chmod(0o755)
    return str(other), build[0]


def test_workers_of_different_builds(tmp_path):
    program, build = with_another_build(tmp_path)
    with FiveProcesses(tmp_path, programs={"shard_worker-1": program}) as cluster:
        cluster.start(wait=False)
        ends(cluster.gateway, 64, "builds differ", build, "f" * len(build), r"rank 1 \(127", "start the same build")
        assert_workers_idle(cluster)


def test_weights_that_differ(tmp_path):
    model = copy_of_the_model(tmp_path)
    shard = model / "model-00002-of-00003.safetensors"  # the same tensors behind a longer header
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    shard.write_bytes((length + 8).to_bytes(8, "little") + data[8:8 + length] + b" " * 8 + data[8 + length:])
    with FiveProcesses(tmp_path, flags={"shard_worker-1": ["--model-dir", str(model)]}) as cluster:
        cluster.start(wait=False)
        ends(cluster.gateway, 64, "weights digest differs", "rank 0 has [0-9a-f]{16}", "rank 1 has [0-9a-f]{16}", "start the same")
        assert_workers_idle(cluster)


def test_configurations_that_differ(tmp_path):
    model = copy_of_the_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    with FiveProcesses(tmp_path, flags={"shard_worker-1": ["--model-dir", str(model)]}) as cluster:
        cluster.start(wait=False)
        ends(cluster.gateway, 64, "config digest differs", "rank 0 has [0-9a-f]{16}", "rank 1 has [0-9a-f]{16}", "start the same")
        assert_workers_idle(cluster)


def test_a_model_that_one_machine_lacks(tmp_path):
    """Its worker says so and exits; the gateway still knows why when it gives up."""
    missing = re.escape(str(tmp_path / "not_here"))
    with FiveProcesses(tmp_path, flags={"shard_worker-1": ["--model-dir", str(tmp_path / "not_here")]}) as cluster:
        cluster.gateway.flags += RENDEZVOUS
        cluster.start(wait=False)
        ends(cluster.workers[1], 65, missing)
        ends(cluster.gateway, 69, "RENDEZVOUS_TIMEOUT = 3 s", r"rank 1 \(", "does not answer", "it said before: .*" + missing)
        assert re.search(rf"model dir={re.escape(os.path.abspath(MODEL_DIR))}$", cluster.gateway.log(), re.M), cluster.gateway.log()


def test_a_rank_that_never_comes(tmp_path):
    with FiveProcesses(tmp_path) as cluster:
        for part in [*cluster.engrams, cluster.workers[0]]:
            part.start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            cluster.workers[1].address = f"127.0.0.1:{free.getsockname()[1]}"
        cluster.gateway.flags += RENDEZVOUS
        cluster.start_gateway(wait=False)
        ends(cluster.gateway, 69, "RENDEZVOUS_TIMEOUT = 3 s", f"rank 1 \\({cluster.workers[1].address}\\)", "start shard_worker there or correct WORKERS")
        assert_workers_idle(cluster)


def test_a_row_service_that_never_comes(tmp_path):
    with FiveProcesses(tmp_path) as cluster:
        for part in [cluster.engrams[0], *cluster.workers]:
            part.start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            cluster.engrams[1].address = f"127.0.0.1:{free.getsockname()[1]}"
        cluster.gateway.flags += RENDEZVOUS
        cluster.start_gateway(wait=False)
        ends(cluster.gateway, 69, "RENDEZVOUS_TIMEOUT = 3 s", r"rank 1 \(", "row service", cluster.engrams[1].address, "start engram_service")
        assert_workers_idle(cluster)


def test_a_row_service_of_another_rank(tmp_path):
    """Both workers are sent to the row service of rank 0: rank 1 finds columns that are not its own."""
    with FiveProcesses(tmp_path) as cluster:
        for part in [cluster.engrams[0], *cluster.workers]:
            part.start()
        cluster.engrams[1].address = cluster.engrams[0].address
        cluster.start_gateway(wait=False)
        ends(cluster.gateway, 64, r"rank 1 \(", cluster.engrams[0].address, "columns of rank 0 of 2; this worker's model has 1 of 2", "ENGRAM_RANK")
        assert_workers_idle(cluster)


def test_a_row_service_with_another_token_map(tmp_path):
    """Two ids change places on rank 1's machine: its half of the columns would come from other rows."""
    model = copy_of_the_model(tmp_path)
    token_map = bytearray((model / "token_map_i32.bin").read_bytes())
    token_map[400:404], token_map[800:804] = token_map[800:804], token_map[400:404]
    (model / "token_map_i32.bin").write_bytes(token_map)
    with FiveProcesses(tmp_path) as cluster:
        cluster.engrams[1].flags[1] = str(model)
        cluster.start(wait=False)
        ends(cluster.gateway, 64, "token maps or hash parameters of the row services differ", "rank 0", "rank 1", "start the same")
        assert_workers_idle(cluster)


def with_other_rows(tmp_path):
    """A copy of the model whose tables have the same shape and other rows: a sign is flipped in each byte that may have one."""
    model = copy_of_the_model(tmp_path)
    weight_map = json.loads(next(model.glob("*.index.json")).read_text())["weight_map"]
    tables = {weight_map[name] for name in weight_map if ".engram.embed." in name}
    for table in tables:
        data = (model / table).read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        tensors = json.loads(data[8:length])
        other = bytearray(data)
        for name, tensor in tensors.items():
            if ".engram.embed.weight" in name:
                begin, end = (length + offset for offset in tensor["data_offsets"])
                other[begin:end] = bytes(byte if byte & 0x7F == 0x7F else byte ^ 0x80 for byte in data[begin:end])
        (model / table).write_bytes(other)
    return model


def packed(model, rank, out):
    subprocess.run([f"{BIN}/pack_rows", "--model-dir", str(model), "--out", str(out), "--rank", str(rank), "--world", "2"], check=True, capture_output=True)
    return ["--engram-packed-dir", str(out)]


@pytest.mark.parametrize("tiers", ["native native", "packed native", "native packed", "packed packed"])
def test_a_row_service_with_another_table_of_the_same_shape(tmp_path, tiers):
    """Each service finds its own table right; only together do the ranks see that there are two."""
    model = with_other_rows(tmp_path)
    tiers = tiers.split()
    with FiveProcesses(tmp_path) as cluster:
        cluster.engrams[1].flags[1] = str(model)
        for rank, source in enumerate([MODEL_DIR, model]):
            if tiers[rank] == "packed":
                cluster.engrams[rank].flags += packed(source, rank, tmp_path / f"packed-{rank}")
        cluster.start(wait=False)
        ends(cluster.gateway, 64, "row digest differs between the Engram tables: layer 1 column 0", "rank 0 has [0-9a-f]{16}", "rank 1 has [0-9a-f]{16}")
        assert_workers_idle(cluster)


def test_tables_of_one_checkpoint_agree_in_every_format(tmp_path):
    """The same rows, packed on one rank: a start as any other."""
    with FiveProcesses(tmp_path) as cluster:
        cluster.engrams[1].flags += packed(MODEL_DIR, 1, tmp_path / "packed")
        cluster.start()
        assert "tier=packed" in cluster.workers[1].log() and "tier=native" in cluster.workers[0].log()
        assert cluster.health()[0] == 200


def test_a_row_service_with_a_damaged_table(tmp_path):
    model = copy_of_the_model(tmp_path)
    weight_map = json.loads(next(model.glob("*.index.json")).read_text())["weight_map"]
    shard = model / weight_map[next(name for name in weight_map if ".engram.embed." in name)]
    shard.write_bytes(shard.read_bytes()[:-100000])
    with FiveProcesses(tmp_path) as cluster:
        cluster.engrams[1].flags[1] = str(model)
        cluster.engrams[1].start(wait=False)
        ends(cluster.engrams[1], 65, re.escape(shard.name), "damaged|fetch it again")


def test_an_epoch_that_is_over(tmp_path):
    """A second gateway finds the workers taken; it gives up, and the first one goes on."""
    with FiveProcesses(tmp_path) as cluster:
        cluster.start()
        second = Part("gateway-2", [*cluster.gateway.flags, *RENDEZVOUS], cluster.run_dir, os.path.join(BIN, "gateway"))
        try:
            second.start(wait=False)
            ends(second, 69, r"rank 0 \(", "SERVING in epoch", "not IDLE", "another gateway")
        finally:
            second.end()
        assert cluster.health()[0] == 200
        assert cluster.status()["epochs_ended"] == 0


def test_workers_of_different_epochs(tmp_path):
    """A worker that has seen a later epoch refuses an earlier one; the gateway's next number is above it."""
    with FiveProcesses(tmp_path) as cluster:
        for part in [*cluster.engrams, *cluster.workers]:
            part.start()
        ahead = int(1000 * time.time()) + 2500
        cluster.workers[1].call("PrepareGroup", {"epoch": str(ahead), "rank": 1, "world": 2})
        cluster.start_gateway()
        wait_until(lambda: f"epoch {ahead}" not in cluster.gateway.log() or "is not above" in cluster.gateway.log(), 20, "refused by name")
        cluster.wait_ready()
        assert re.search(rf"rank 1 .* is not above {ahead}", cluster.gateway.log()), cluster.gateway.log()
        assert cluster.status()["epoch"] > ahead
