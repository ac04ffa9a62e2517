"""A thousand malformed or hostile requests while eight good streams run: each is refused clearly, the streams say what they always say.

The kinds are listed once and drawn with a seed; a refusal is a 4xx with the error object of the API, or, for half requests that
are never completed, a connection that the client gives up.
"""

import json
import os
import random
import socket
import subprocess
import threading
import time
import urllib.parse

from conftest import MODEL_ID

SEED = int(os.environ.get("TWINSPARK_SEED", "20261201"))
NUM_HOSTILE = 1000
NUM_STREAMS = 8
GOOD = {"model": MODEL_ID, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def http(body, headers=(), method="POST", path=CHAT, length=None):
    body = body if isinstance(body, bytes) else body.encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def with_field(field, value):
    return http(json.dumps({**GOOD, field: value}))


WRONG_VALUES = [True, 3.5, -7, 1e300, "text", [], [None], {}, {"a": {"b": []}}, [[1]], "\u0000"]
TYPED_FIELDS = ["messages", "temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "seed", "stop", "stream", "stream_options", "tools",
                "tool_choice", "response_format", "logit_bias", "logprobs", "top_logprobs", "stop_token_ids", "allowed_token_ids",
                "bad_words", "min_tokens", "reasoning_effort", "thinking", "chat_template_kwargs", "model", "repetition_penalty",
                "prompt_logprobs", "presence_penalty", "frequency_penalty", "echo", "include_stop_str_in_output", "return_token_ids", "request_id"]


def hostile(rng):
    """(kind, bytes, statuses that are a clear refusal; 200 where the value happens to be right)."""
    kind = rng.choice(["deep", "utf8", "cut_json", "type", "type", "type", "large", "header_flood", "long_header", "binary", "half", "slow", "bad_length",
                       "chunks", "path", "method", "surrogate", "number", "smuggle", "content_type", "long_context"])
    if kind == "deep":
        depth = rng.randint(129, 50000)
        return kind, http(rng.choice(["[" * depth, '{"a":' * depth, json.dumps(GOOD)[:-1] + ',"x":' + "[" * depth])), {400}
    if kind == "utf8":
        return kind, http(json.dumps(GOOD).encode().replace(b"hi", bytes(rng.randrange(128, 256) for _ in range(3)) + b"\xff")), {400}
    if kind == "cut_json":
        text = json.dumps(GOOD)
        return kind, http(text[: rng.randrange(len(text))]), {400}
    if kind == "type":
        return kind, with_field(rng.choice(TYPED_FIELDS), rng.choice(WRONG_VALUES)), {200, 400, 404}
    if kind == "large":
        return kind, http(b"", length=100 * 1000 * 1000) + b"x" * 65536, {413}
    if kind == "header_flood":
        return kind, http("{}", [f"X-{i}: {i}" for i in range(rng.randint(4000, 6000))]), {431}
    if kind == "long_header":
        return kind, http("{}", ["X-Long: " + "a" * rng.randint(40000, 90000)]), {431}
    if kind == "binary":
        return kind, bytes(rng.randrange(256) for _ in range(rng.randint(1, 2000))) + b"\r\n\r\n", {400, 431, 505}
    if kind == "half":
        request = http(json.dumps(GOOD))
        return kind, request[: rng.randrange(1, len(request))], set()
    if kind == "slow":  # the body comes in drops over half a second, and is cut in the end
        body = json.dumps(GOOD)[:-1].encode()
        return kind, http(body), {400}
    if kind == "bad_length":
        return kind, http("{}", length=rng.choice(["-1", "abc", "99999999999999999999", "1e3"])), {400, 413}
    if kind == "chunks":
        return kind, f"POST {CHAT} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{rng.choice(['zz', '-5', 'ffffffffffffffffff'])}\r\nx".encode(), {400, 413}
    if kind == "path":
        return kind, http("{}", path="/" + urllib.parse.quote(bytes(rng.randrange(256) for _ in range(30)))), {404}
    if kind == "method":
        return kind, http("", method=rng.choice(["PUT", "DELETE", "PATCH", "GET", "OPTIONS"])), {405}
    if kind == "surrogate":
        return kind, http(json.dumps(GOOD).replace("hi", rng.choice([r"\ud800", r"\udfff", r"\ud800x", r"\udc00\ud800"]))), {400}
    if kind == "number":
        return kind, http(json.dumps(GOOD)[:-1] + ',"temperature":' + rng.choice(["1e999", "-1e999", "NaN", "Infinity", "01", "0x10", "1."]) + "}"), {400}
    if kind == "smuggle":
        return kind, (f"POST {CHAT} HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /").encode(), {400}
    if kind == "content_type":
        return kind, http(json.dumps(GOOD), ["Content-Type: " + rng.choice(["text/xml", "multipart/form-data", "\x01"])]), {400, 415}
    return kind, with_field("messages", [{"role": "user", "content": "word " * rng.randint(40000, 60000)}]), {400}


def send(host, port, data, expects_answer, num_drops=1):
    """Status and body of the first answer; None when the connection ended without one."""
    with socket.create_connection((host, port), timeout=30) as connection:
        try:
            for drop in range(num_drops):
                connection.sendall(data[len(data) * drop // num_drops : len(data) * (drop + 1) // num_drops])
                if num_drops > 1:
                    time.sleep(0.5 / num_drops)
        except OSError:
            pass  # refused before all of it was sent; the answer may be there
        if not expects_answer:
            return None, b""
        received = b""
        try:
            while b"\r\n\r\n" not in received:
                piece = connection.recv(65536)
                if not piece:
                    return None, received
                received += piece
            head, _, body = received.partition(b"\r\n\r\n")
            length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), None)
            while length is not None and len(body) < length:
                piece = connection.recv(65536)
                if not piece:
                    break
                body += piece
        except ConnectionResetError:
            return None, received
        return int(received.split(b" ")[1]), body


def test_a_thousand_hostile_requests_harm_no_stream(cluster, client):
    rng = random.Random(SEED)
    print("seed", SEED)
    host, port = urllib.parse.urlsplit(cluster.url).hostname, urllib.parse.urlsplit(cluster.url).port
    body = {**GOOD, "messages": [{"role": "user", "content": "tell me a story"}], "temperature": 0, "stream": True,
            "chat_template_kwargs": {"enable_thinking": False}}
    alone = story(cluster, body)
    done = threading.Event()
    wrong = []

    def stream():
        while not done.is_set():
            text = story(cluster, body)
            if text != alone:
                wrong.append(text)

    threads = [threading.Thread(target=stream) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        for i in range(NUM_HOSTILE):
            kind, data, refusals = hostile(rng)
            status, answer = send(host, port, data, expects_answer=bool(refusals), num_drops=20 if kind == "slow" else 1)
            if not refusals:
                continue
            assert status in refusals, (i, kind, status, data[:300], answer[:300])
            if status >= 400:
                error = json.loads(answer)["error"]
                assert error["message"] and error["type"], (i, kind, answer)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    cluster.wait_idle(2)
    assert cluster.status()["state"] == "READY"


def story(cluster, body):
    """The text of a streamed story, over curl."""
    curl = subprocess.run(["curl", "-sN", "--max-time", "60", cluster.url + CHAT, "-H", "Content-Type: application/json", "-d", json.dumps(body)],
                          capture_output=True, text=True)
    text = ""
    for line in curl.stdout.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
    return text
