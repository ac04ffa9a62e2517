"""Log-probabilities of prompts: the same alone, under load and in chunks of a long prompt, and those that generation reports for the
same tokens; in the legacy format of completions with echo, whole and streamed."""

import json
import threading

import pytest

from conftest import MODEL_ID

PROMPT = "The capital of France is"
LONG = " ".join(f"{i} {word}" for i, word in enumerate(("count from one to twenty and say why " * 90).split()))


def completion(cluster, **fields):
    status, reply = cluster.post("/v1/completions", {"model": MODEL_ID, "max_tokens": 1, "temperature": 0, **fields})
    assert status == 200, reply
    return reply["choices"][0]


def ids_of(cluster, text):
    return cluster.post("/tokenize", {"prompt": text})[1]["tokens"]


def own_entries(entries, ids):
    """Log-probability and rank of each prompt token, from the second on."""
    assert entries[0] is None and len(entries) == len(ids)
    return [(entry[str(token)]["logprob"], entry[str(token)]["rank"]) for entry, token in zip(entries[1:], ids[1:])]


@pytest.fixture(scope="module")
def long_alone(cluster):
    return completion(cluster, prompt=LONG, prompt_logprobs=2)["prompt_logprobs"]


def test_every_token_with_its_best(cluster):
    ids = ids_of(cluster, PROMPT)
    entries = completion(cluster, prompt=PROMPT, prompt_logprobs=3)["prompt_logprobs"]
    for (logprob, rank), entry in zip(own_entries(entries, ids), entries[1:]):
        assert logprob <= 0 and rank >= 1
        best = sorted((other["rank"], -other["logprob"]) for other in entry.values())
        assert [rank for rank, _ in best][:3] == [1, 2, 3]
        assert best == sorted(best, key=lambda pair: pair[1]), "a better rank has a larger log-probability"
        assert len(entry) == (3 if rank <= 3 else 4)
        assert all(isinstance(other["decoded_token"], str) for other in entry.values())


def test_equal_to_those_of_generation(cluster):
    generated = completion(cluster, prompt=PROMPT, max_tokens=20, logprobs=2, return_token_ids=True, ignore_eos=True)
    ids = ids_of(cluster, PROMPT)
    again = completion(cluster, prompt=ids + generated["token_ids"], prompt_logprobs=2)["prompt_logprobs"]
    reported = [logprob for logprob, _ in own_entries(again, ids + generated["token_ids"])][len(ids) - 1:]
    assert reported == generated["logprobs"]["token_logprobs"]


def test_long_prompts_under_load(cluster, long_alone):
    """The prompt is longer than a chunk of log-probabilities; under load its chunks are cut by what else runs."""
    ids = ids_of(cluster, LONG)
    assert len(ids) > 1024
    assert len(own_entries(long_alone, ids)) == len(ids) - 1
    stop = threading.Event()

    def load(i):
        while not stop.is_set():
            cluster.post("/v1/chat/completions", {"model": MODEL_ID, "messages": [{"role": "user", "content": f"tell me story {i}"}],
                                                  "max_tokens": 30, "temperature": 1.5, "logprobs": i % 2 == 0})

    threads = [threading.Thread(target=load, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert completion(cluster, prompt=LONG, prompt_logprobs=2)["prompt_logprobs"] == long_alone
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_chat_and_choices_share_the_prompt(cluster):
    body = {"model": MODEL_ID, "messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 0, "max_tokens": 2, "n": 3,
            "return_token_ids": True}
    status, reply = cluster.post("/v1/chat/completions", body)
    assert status == 200 and len(reply["choices"]) == 3
    assert len(own_entries(reply["prompt_logprobs"], reply["prompt_token_ids"])) == len(reply["prompt_token_ids"]) - 1
    status, reply = cluster.post("/v1/chat/completions", {**body, "stream": True})
    assert status == 400 and reply["error"]["param"] == "prompt_logprobs"


def test_echo_in_the_legacy_format(cluster, client):
    ids = ids_of(cluster, PROMPT)
    entries = completion(cluster, prompt=PROMPT, prompt_logprobs=2)["prompt_logprobs"]
    answer = completion(cluster, prompt=PROMPT, max_tokens=4, echo=True, logprobs=2)
    logprobs = answer["logprobs"]
    assert logprobs["token_logprobs"][:len(ids)] == [None] + [logprob for logprob, _ in own_entries(entries, ids)]
    assert logprobs["top_logprobs"][0] is None
    # Each token stands in the text where its offset says; BOS is not in the text.
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"]))[1:]:
        assert answer["text"][offset:].startswith(token)
    chunks = list(client.completions.create(model=MODEL_ID, prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=2, stream=True))
    streamed = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in streamed) == answer["text"]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for choice in streamed if choice.logprobs for value in getattr(choice.logprobs, field)]
        assert json.loads(json.dumps(joined)) == logprobs[field]
    only = completion(cluster, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    assert only["text"] == PROMPT and only["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:len(ids)]
