"""Talks to a running server through the official `openai` package.

Usage: openai_client.py BASE_URL. Prints `ok NAME` for each check that holds; the first one that
does not ends the program with its traceback and exit code 1.
"""

import json
import sys

import openai

MODEL = "dsv4-mini"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather forecast of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
FACTS = (
    "The code of the red vault in Oslo is 55231. Rain is expected in Lima on Monday. "
    "The serial number of the Kyoto pump is 90417. Ada walked past the kiosk without a word."
)


def ask(client, text, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **more)


def collect(stream):
    """Joins a streamed chat: content, reasoning, calls by index, finish reasons, usage."""
    content, reasoning, calls, reasons, usage = "", "", {}, [], None
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
            if choice.finish_reason is not None:
                reasons.append(choice.finish_reason)
    return content, reasoning, calls, reasons, usage


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


def check_models(client):
    ids = [model.id for model in client.models.list()]
    assert MODEL in ids, ids
    assert client.models.retrieve(MODEL).id == MODEL


def check_chat(client):
    answer = ask(client, f"{FACTS}\n\nWhat is the code of the red vault in Oslo?")
    choice = answer.choices[0]
    assert choice.message.content == "The code of the red vault in Oslo is 55231.", choice
    assert choice.message.role == "assistant" and choice.finish_reason == "stop", choice
    usage = answer.usage
    assert usage.prompt_tokens > 30 and usage.completion_tokens > 5, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


def check_conversation(client):
    messages = [
        {"role": "system", "content": "Answer from the records."},
        {"role": "user", "content": f"{FACTS}\n\nHi"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "What is the serial number of the Kyoto pump?"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert "90417" in answer.choices[0].message.content, answer


def check_stream(client):
    whole = ask(client, "Count from 3 to 12.")
    content, reasoning, calls, reasons, usage = collect(ask(client, "Count from 3 to 12.", stream=True))
    assert content == whole.choices[0].message.content, (content, whole)
    assert reasons == [whole.choices[0].finish_reason], reasons
    assert not calls and not reasoning and usage is None, (calls, reasoning, usage)


def check_usage_in_stream(client):
    whole = ask(client, "Hello")
    stream = ask(client, "Hello", stream=True, stream_options={"include_usage": True})
    usage = collect(stream)[4]
    assert usage is not None
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    for name in counts:
        assert getattr(usage, name) == getattr(whole.usage, name), (name, usage, whole.usage)


def check_tools(client):
    question = "What will the weather be in Lima for the next 3 days?"
    answer = ask(client, question, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.id, call
    assert call.function.name == "get_weather", call
    assert json.loads(call.function.arguments) == {"city": "Lima", "days": 3}, call
    messages = [
        {"role": "user", "content": question},
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny", "celsius": 21}'},
    ]
    final = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], temperature=0
    )
    assert final.choices[0].message.content == "It is sunny in Lima, 21 degrees.", final


def check_tools_in_stream(client):
    question = "What will the weather be in Lima for the next 3 days?"
    stream = ask(client, question, tools=[WEATHER], stream=True)
    content, _, calls, reasons, _ = collect(stream)
    assert reasons == ["tool_calls"], reasons
    assert not content.strip(), content
    assert list(calls) == [0] and calls[0]["id"], calls
    assert calls[0]["name"] == "get_weather", calls
    assert json.loads(calls[0]["arguments"]) == {"city": "Lima", "days": 3}, calls


def check_structured_output(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["yes", "no"]}},
        "required": ["ok", "word"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "v", "schema": schema, "strict": True}}
    answer = ask(client, "Hi", response_format=format, max_tokens=100)
    assert answer.choices[0].finish_reason == "stop", answer
    verdict = json.loads(answer.choices[0].message.content)
    assert isinstance(verdict["ok"], bool) and verdict["word"] in ("yes", "no"), verdict
    assert len(verdict) == 2, verdict
    content = collect(ask(client, "Hi", response_format=format, max_tokens=100, stream=True))[0]
    assert json.loads(content) == verdict, content
    regex = {"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}
    text = ask(client, "Hi", extra_body=regex).choices[0].message.content
    assert len(text) == 6 and text[3] == "-", text


def check_strict_tools(client):
    parameters = WEATHER["function"]["parameters"]
    parameters = parameters | {"required": ["city", "days"], "additionalProperties": False}
    strict = {"type": "function", "function": WEATHER["function"] | {"parameters": parameters, "strict": True}}
    answer = ask(client, "Hi", tools=[strict], tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        found = json.loads(call.function.arguments)
        assert isinstance(found["city"], str) and isinstance(found["days"], int), found


def check_several_answers(client):
    messages = [{"role": "user", "content": "Tell me a joke."}]
    fields = {"model": MODEL, "messages": messages, "n": 2, "temperature": 1.3, "seed": 11, "max_tokens": 16}
    one, two = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [[choice.message.content for choice in answer.choices] for answer in (one, two)]
    assert len(texts[0]) == 2 and texts[0] == texts[1], texts


def check_tool_choice_none(client):
    answer = ask(client, "Hello", tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None, answer
    assert answer.choices[0].message.content, answer


def check_thinking(client):
    question = f"{FACTS}\n\nWhat is the code of the red vault in Oslo?"
    thinking = {"thinking": {"type": "enabled"}}
    answer = ask(client, question, extra_body=thinking)
    message = answer.choices[0].message
    assert message.reasoning_content and "55231" in message.reasoning_content, message
    assert message.content == "The code of the red vault in Oslo is 55231.", message
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0, answer.usage
    content, reasoning, _, reasons, _ = collect(ask(client, question, extra_body=thinking, stream=True))
    assert (content, reasoning) == (message.content, message.reasoning_content), (content, reasoning)
    assert reasons == ["stop"], reasons
    plain = ask(client, question).choices[0].message
    assert not getattr(plain, "reasoning_content", None), plain


def check_logprobs(client):
    answer = ask(client, "Hi", logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content, tokens
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3, token
        assert token.top_logprobs[0].token == token.token, token


def check_stop_string(client):
    answer = ask(client, "Count from 3 to 12.", stop=["7"])
    assert answer.choices[0].message.content == "3, 4, 5, 6, ", answer
    assert answer.choices[0].finish_reason == "stop", answer
    content, _, _, reasons, _ = collect(ask(client, "Count from 3 to 12.", stop=["7"], stream=True))
    assert (content, reasons) == ("3, 4, 5, 6, ", ["stop"]), (content, reasons)


def check_max_tokens(client):
    answer = ask(client, "Count from 3 to 12.", max_tokens=4)
    assert answer.choices[0].finish_reason == "length", answer
    assert answer.usage.completion_tokens == 4, answer.usage
    newer = ask(client, "Count from 3 to 12.", max_completion_tokens=4)
    assert newer.choices[0].message.content == answer.choices[0].message.content, newer


def check_sampling_is_reproducible(client):
    messages = [{"role": "user", "content": "Tell me a joke."}]
    fields = {"model": MODEL, "messages": messages, "temperature": 1.3, "top_p": 0.9, "max_tokens": 20}
    texts = [
        client.chat.completions.create(seed=11, **fields).choices[0].message.content for _ in range(2)
    ]
    assert texts[0] == texts[1], texts


def check_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt="The code of the red", max_tokens=6, temperature=0
    )
    assert answer.choices[0].text and answer.choices[0].finish_reason in ("stop", "length"), answer
    stream = client.completions.create(
        model=MODEL, prompt="The code of the red", max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def check_unknown_model(client):
    call = lambda: client.chat.completions.create(
        model="gpt-9", messages=[{"role": "user", "content": "Hi"}]
    )
    error = fails(openai.NotFoundError, call)
    assert error.code == "model_not_found" and "gpt-9" in error.message, error


def check_too_long_prompt(client):
    error = fails(openai.BadRequestError, lambda: ask(client, "Rain is expected. " * 6000))
    assert error.code == "context_length_exceeded", error


def check_bad_parameters(client):
    for fields in ({"temperature": 99}, {"top_p": -1}, {"max_tokens": 0}, {"n": 300}, {"top_logprobs": 99}):
        fields = {"temperature": 0, "logprobs": True} | fields
        call = lambda: client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], **fields
        )
        error = fails(openai.BadRequestError, call)
        assert error.type == "invalid_request_error", (fields, error)


def check_bad_messages(client):
    call = lambda: client.chat.completions.create(
        model=MODEL, messages=[{"role": "wizard", "content": "Hi"}]
    )
    fails(openai.BadRequestError, call)
    fails(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=[]))


def main():
    client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
    for name, check in sorted(globals().items()):
        if name.startswith("check_"):
            try:
                check(client)
            except Exception:
                print(f"failed {name}", flush=True)
                raise
            print(f"ok {name}", flush=True)


if __name__ == "__main__":
    main()
