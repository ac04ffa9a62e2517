"""The official Python client, unmodified, talks to the cluster: what an application does."""

import openai
import pytest

from conftest import MODEL_ID, OFF

QUESTION = [{"role": "user", "content": "What is 17*19? Reply with the integer only."}]
STORY = [{"role": "user", "content": "tell me a story"}]
# Nothing the demo model was trained on: what it says at a high temperature is wide open.
OPEN = [{"role": "user", "content": "purple elephants sing"}]


def ask(client, messages=None, **fields):
    fields.setdefault("extra_body", OFF)
    return client.chat.completions.create(model=MODEL_ID, messages=messages or QUESTION, **fields)


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL_ID]
    assert client.models.retrieve(MODEL_ID).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_chat(client):
    answer = ask(client, temperature=0, max_tokens=32)
    choice = answer.choices[0]
    assert choice.message.content == "323"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert not hasattr(choice.message, "reasoning_content")
    assert answer.usage.prompt_tokens == 17 and answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == 19


def test_thinking_is_split_off(client):
    answer = ask(client, temperature=0, extra_body={})
    assert answer.choices[0].message.content == "323"
    assert "17*19=323" in answer.choices[0].message.reasoning_content
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens


def test_reasoning_effort(client):
    low = ask(client, temperature=0, reasoning_effort="low", extra_body={})
    off = ask(client, temperature=0, reasoning_effort="none", extra_body={})
    assert low.choices[0].message.reasoning_content
    assert off.choices[0].message.content == "323"


def test_stream_with_usage(client):
    whole = ask(client, STORY, temperature=0)
    chunks = list(ask(client, STORY, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_stop_string(client):
    whole = ask(client, STORY, temperature=0).choices[0].message.content
    stop = whole.split()[5]
    for stream in (False, True):
        answer = ask(client, STORY, temperature=0, stop=[stop, "zzz"], stream=stream)
        if stream:
            chunks = list(answer)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"


def test_max_tokens(client):
    answer = ask(client, STORY, temperature=0, max_completion_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4


def test_seed_repeats(client):
    def story(seed):
        return ask(client, OPEN, temperature=2, top_p=1, max_tokens=24, seed=seed).choices[0].message.content

    assert story(1) == story(1)
    assert len({story(seed) for seed in range(1, 6)}) > 1


def test_n_choices_differ_and_repeat(client):
    def stories():
        answer = ask(client, OPEN, temperature=2, top_p=1, max_tokens=24, seed=3, n=3)
        return [choice.message.content for choice in answer.choices]

    first = stories()
    assert len(set(first)) > 1
    assert stories() == first


def test_logprobs(client):
    answer = ask(client, temperature=0, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["323"]
    assert bytes(entries[0].bytes).decode() == "323"
    assert len(entries[0].top_logprobs) == 3
    best = entries[0].top_logprobs[0]
    assert best.token == "323" and best.logprob == entries[0].logprob
    assert entries[0].top_logprobs[1].logprob < best.logprob <= 0


def test_tools_and_format_are_rendered(client):
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    plain = ask(client, max_tokens=1).usage.prompt_tokens
    assert ask(client, max_tokens=1, tools=[tool]).usage.prompt_tokens > plain + 100
    reply = client.chat.completions.with_raw_response.create(
        model=MODEL_ID, messages=QUESTION, max_tokens=1, extra_body=OFF,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}})
    assert reply.headers["x-structured-output"] == "prompt-only"
    assert reply.parse().usage.prompt_tokens > plain


def test_text_completions(client):
    answer = client.completions.create(model=MODEL_ID, prompt="The capital of France is", max_tokens=4, temperature=0, echo=True)
    assert answer.choices[0].text.startswith("The capital of France is")
    stream = client.completions.create(model=MODEL_ID, prompt="The capital of France is", max_tokens=4, temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert answer.choices[0].text == "The capital of France is" + text
    scored = client.completions.create(model=MODEL_ID, prompt="The capital of France is", max_tokens=4, logprobs=1, temperature=0)
    assert "".join(scored.choices[0].logprobs.tokens) == text
    assert all(value <= 0 for value in scored.choices[0].logprobs.token_logprobs)


def test_logit_bias_and_allowed_ids(client, cluster):
    _, reply = cluster.post("/tokenize", {"prompt": "cat", "add_special_tokens": False})
    token = reply["tokens"][0]
    forced = ask(client, temperature=0, max_tokens=3, logit_bias={str(token): 100})
    allowed = ask(client, temperature=0, max_tokens=3, extra_body={**OFF, "allowed_token_ids": [token]})
    _, text = cluster.post("/detokenize", {"tokens": [token] * 3})
    assert forced.choices[0].message.content == text["prompt"]
    assert allowed.choices[0].message.content == text["prompt"]


@pytest.mark.parametrize("fields, param", [
    ({"temperature": 3}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]},
     "messages[0].content[0]"),
])
def test_bad_requests_are_typed(client, fields, param):
    fields = {"messages": QUESTION, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL_ID, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_unknown_model_and_context_length(client, cluster):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    limit = cluster.status()["limits"]["max_context"]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, max_tokens=limit)
    assert caught.value.code == "context_length_exceeded"
    assert f"maximum context length is {limit} tokens" in str(caught.value)


def test_unknown_fields_are_ignored(client):
    assert ask(client, temperature=0, extra_body={**OFF, "something_new": 1}).choices[0].message.content == "323"
