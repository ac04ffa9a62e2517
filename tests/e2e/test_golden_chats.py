"""The demo model's golden chats over HTTP give the stored token ids: alone, and nine at once."""

import threading
import time

from conftest import MODEL_ID

AT_ONCE = 9


def body_of(case):
    """The request of a golden chat; tools and response format stand at the top level of the API."""
    body = {"model": MODEL_ID, "temperature": 0, "return_token_ids": True, "max_tokens": len(case["output_ids"]),
            "chat_template_kwargs": {"enable_thinking": bool(case["thinking"])}}
    if case["effort"] is not None:
        body["reasoning_effort"] = case["effort"]
    body["messages"] = []
    for message in case["messages"]:
        message = dict(message)
        if "tools" in message:
            body["tools"] = message.pop("tools")
        if "response_format" in message:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": message.pop("response_format")}}
        body["messages"].append(message)
    return body


def chats(golden):
    return [case for case in golden if case.get("messages")]


def check(case, status, reply):
    assert status == 200, (case["name"], reply)
    assert reply["prompt_token_ids"] == case["prompt_ids"], case["name"]
    assert reply["choices"][0]["token_ids"] == case["output_ids"], case["name"]


def test_every_chat_alone(cluster, golden):
    assert len(chats(golden)) > 20
    for case in chats(golden):
        check(case, *cluster.post("/v1/chat/completions", body_of(case)))
    cluster.wait_idle(1)


def test_every_raw_prompt(cluster, golden):
    for case in golden:
        if case.get("messages"):
            continue
        status, reply = cluster.post("/v1/completions", {"model": MODEL_ID, "prompt": case["prompt_ids"], "temperature": 0,
                                                          "max_tokens": len(case["output_ids"]), "return_token_ids": True})
        check(case, status, reply)


def test_nine_at_once(cluster, golden):
    """The longest answers run together; the test sees nine sequences with a slot at one moment."""
    cases = sorted(chats(golden), key=lambda case: len(case["output_ids"]))[-AT_ONCE:]
    most_running = 0
    for _ in range(20):  # all nine overlap in nearly every round; which one is not ours to choose
        replies = [None] * AT_ONCE
        start = threading.Barrier(AT_ONCE + 1)

        def run(i):
            start.wait()
            replies[i] = cluster.post("/v1/chat/completions", body_of(cases[i]))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        start.wait()
        while any(thread.is_alive() for thread in threads):
            most_running = max(most_running, cluster.status()["requests"]["running"])
            time.sleep(0.005)
        for thread in threads:
            thread.join()
        for case, reply in zip(cases, replies):
            check(case, *reply)
        if most_running >= AT_ONCE:
            break
    assert most_running >= AT_ONCE
    cluster.wait_idle(1)


def test_streamed_ids_are_the_same(golden, client):
    case = max(chats(golden), key=lambda case: len(case["output_ids"]))
    body = body_of(case)
    body.pop("model")
    extra = {key: body.pop(key) for key in ("chat_template_kwargs", "return_token_ids")}
    ids = []
    for chunk in client.chat.completions.create(model=MODEL_ID, stream=True, extra_body=extra, **body):
        if chunk.choices:
            ids += getattr(chunk.choices[0], "token_ids", None) or []
    assert ids == case["output_ids"]
