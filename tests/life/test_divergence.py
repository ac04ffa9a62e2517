"""One rank computes something else: a sign or exponent bit is flipped in (a) a replicated weight, (b) a cached row, (c) a reduced sum
that the next op reads. The epoch ends before a token of that op is sent, the gateway's log has both values, and the next epoch, with
weights loaded again, answers as before.

The hook answers when it is armed; the worker's log says at which op it struck. Without run-ahead every op of a stream is one event
at the client, so the number of events is the number of ops before the struck one, exactly.
"""

import re

import pytest

from five_processes import FiveProcesses, Stream, wait_until

STORY = "tell me a story"
TARGETS = ["REPLICATED_WEIGHT", "CACHED_ROW", "REDUCED_SUM"]
SIGN, EXPONENT = 31, 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    hooks = {"TEST_HOOKS": "1"}
    with FiveProcesses(tmp_path_factory.mktemp("divergence"), env={"shard_worker-0": hooks, "shard_worker-1": hooks},
                       flags={"gateway": ["--run-ahead", "0"]}) as started:
        started.start()
        yield started


@pytest.fixture(scope="module")
def story(cluster):
    stream = Stream(cluster, STORY, max_tokens=1500)
    stream.finish(120)
    assert len(stream.tokens) == 1500
    return stream.tokens


@pytest.mark.parametrize("bit", [SIGN, EXPONENT], ids=["sign", "exponent"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_epoch_ends_before_a_token_of_that_op(cluster, story, target, bit, rank):
    cluster.wait_ready()
    wait_until(lambda: all(int(worker.call("Status")["slots_in_use"]) == 0 for worker in cluster.workers), 20, "idle")
    ops_before = int(cluster.workers[0].call("Status")["last_op_id"])
    before = cluster.status()
    gateway_log = len(cluster.gateway.log())
    worker_log = len(cluster.workers[rank].log())
    stream = Stream(cluster, STORY)
    stream.wait_tokens(30)
    cluster.workers[rank].call("FlipBit", {"target": target, "bit": bit, "slot": 0})
    stream.finish(20)
    struck = re.search(r"fault injected epoch=\d+ op=(\d+) what=(.*)", cluster.workers[rank].log()[worker_log:])
    assert struck, cluster.workers[rank].log()[worker_log:]
    said = re.search(r"ERROR gateway epoch \d+ ended: .*op (\d+).*digest ([0-9a-f]{16}) on rank 0, ([0-9a-f]{16}) on rank 1.*cause=divergence",
                     cluster.gateway.log()[gateway_log:])
    assert said, cluster.gateway.log()[gateway_log:]
    print(f"rank {rank}: {struck[2]}; {said[0].split('ended: ')[1]}")
    assert said[1] == struck[1], "another op was blamed"
    assert said[2] != said[3]
    assert len(stream.errors) == 1 and "engine_restarting" in stream.errors[0]["message"], stream.errors
    assert stream.tokens == story[: len(stream.tokens)]
    assert stream.num_steps == int(struck[1]) - ops_before - 1, "tokens of the struck op were sent, or right ones were not"
    after = cluster.status()
    assert after["divergences"] == before["divergences"] + 1
    wait_until(lambda: cluster.status()["epoch"] > before["epoch"], 60, "the next epoch")
    cluster.wait_ready()
    again = Stream(cluster, STORY, max_tokens=60)
    again.finish(60)
    assert again.tokens == story[:60]
