"""Talks to a running server through the official `anthropic` package.

Usage: anthropic_client.py BASE_URL. Prints `ok NAME` for each check that holds; the first one that
does not ends the program with its traceback and exit code 1.
"""

import json
import sys

import anthropic

MODEL = "dsv4-mini"
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather forecast of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
FACTS = (
    "The code of the red vault in Oslo is 55231. Rain is expected in Lima on Monday. "
    "The serial number of the Kyoto pump is 90417. Ada walked past the kiosk without a word."
)
RECALL = f"{FACTS}\n\nWhat is the code of the red vault in Oslo?"
ANSWER = "The code of the red vault in Oslo is 55231."
FORECAST = "What will the weather be in Lima for the next 3 days?"
# The package has no parameter for what newer models of Anthropic no longer take.
GREEDY = {"temperature": 0}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def user(content):
    return {"role": "user", "content": content}


def fields(content, **more):
    messages = content if isinstance(content, list) else [user(content)]
    return {"model": MODEL, "max_tokens": 300, "messages": messages, "extra_body": GREEDY} | more


def ask(client, content, **more):
    return client.messages.create(**fields(content, **more))


def final(client, content, **more):
    """The message that the package puts together from a stream, and its text piece by piece."""
    with client.messages.stream(**fields(content, **more)) as stream:
        pieces = list(stream.text_stream)
        return stream.get_final_message(), pieces


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


def check_message(client):
    message = ask(client, RECALL)
    assert text(message) == ANSWER, message
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn"), message
    assert message.model == MODEL and message.id.startswith("msg_"), message
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 30 and usage.output_tokens > 5, usage
    assert message._request_id, message


def check_conversation(client):
    messages = [
        user(f"{FACTS}\n\nHi"),
        {"role": "assistant", "content": "Hello! How can I help you?"},
        user("What is the serial number of the Kyoto pump?"),
    ]
    for system in ("Answer from the records.", [{"type": "text", "text": "Answer from the records."}]):
        assert "90417" in text(ask(client, messages, system=system)), system


def check_stream(client):
    whole = ask(client, "Count from 3 to 12.")
    message, pieces = final(client, "Count from 3 to 12.")
    assert text(message) == text(whole) == "".join(pieces) and len(pieces) > 3, (pieces, whole)
    assert message.stop_reason == whole.stop_reason, message
    counts = [
        u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens
        for u in (message.usage, whole.usage)
    ]
    assert counts[0] == counts[1] and message.usage.output_tokens == whole.usage.output_tokens, counts


def check_stream_events(client):
    events = list(client.messages.create(stream=True, **fields("Hello")))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"], kinds
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds


def check_tools(client):
    message = ask(client, FORECAST, tools=[WEATHER])
    assert message.stop_reason == "tool_use", message
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Lima", "days": 3}), call
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky": "sunny", "celsius": 21}'}
    messages = [user(FORECAST), {"role": "assistant", "content": message.content}, user([result])]
    answer = ask(client, messages, tools=[WEATHER])
    assert text(answer) == "It is sunny in Lima, 21 degrees.", answer
    assert answer.stop_reason == "end_turn", answer


def check_tools_in_stream(client):
    message, _ = final(client, FORECAST, tools=[WEATHER])
    assert message.stop_reason == "tool_use", message
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.id and call.input == {"city": "Lima", "days": 3}, call


def check_tool_choice(client):
    none = ask(client, "Hello", tools=[WEATHER], tool_choice={"type": "none"})
    assert text(none) and all(block.type == "text" for block in none.content), none
    forced = ask(client, FORECAST, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [block.type for block in forced.content] == ["tool_use"], forced


def check_structured_output(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    config = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    body = GREEDY | {"output_config": config}
    message = client.messages.create(**fields("Hi", extra_body=body))
    assert isinstance(json.loads(message.content[0].text)["ok"], bool), message


def check_thinking(client):
    message = ask(client, RECALL, thinking=THINKING)
    thoughts = message.content[0]
    assert thoughts.type == "thinking" and "55231" in thoughts.thinking and thoughts.signature, message
    assert text(message) == ANSWER, message
    assert message.usage.output_tokens_details.thinking_tokens > 0, message.usage
    streamed, _ = final(client, RECALL, thinking=THINKING)
    assert streamed.content[0].thinking == thoughts.thinking and text(streamed) == ANSWER, streamed
    # The blocks go back as they came.
    messages = [
        user(RECALL),
        {"role": "assistant", "content": message.content},
        user("What is the serial number of the Kyoto pump?"),
    ]
    assert "90417" in text(ask(client, messages)), "after thinking"
    assert [block.type for block in ask(client, RECALL).content] == ["text"], "thinks unasked"


def check_stop_sequence(client):
    message = ask(client, "Count from 3 to 12.", stop_sequences=["never", "7"])
    assert text(message) == "3, 4, 5, 6, ", message
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "7"), message


def check_max_tokens(client):
    message = ask(client, "Count from 3 to 12.", max_tokens=4)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 4), message


def check_continuation(client):
    whole = text(ask(client, "Count from 3 to 12."))
    begun = {"role": "assistant", "content": whole[:9]}
    assert text(ask(client, [user("Count from 3 to 12."), begun])) == whole[9:], whole


def check_count_tokens(client):
    asked = {"model": MODEL, "messages": [user(RECALL)], "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(max_tokens=1, **asked).usage
    sent = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted == sent > 30, (counted, usage)


def check_cache(client):
    block = {
        "type": "text",
        "text": "The sky over Oslo is blue today. " * 80 + FACTS,
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    first, second = (
        ask(client, [user([block, {"type": "text", "text": "Hi"}])], max_tokens=1).usage for _ in range(2)
    )
    assert first.cache_creation_input_tokens > 256, first
    assert second.cache_read_input_tokens > 256, second
    totals = {u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens for u in (first, second)}
    assert len(totals) == 1, (first, second)


def check_unknown_model(client):
    error = fails(anthropic.NotFoundError, lambda: ask(client, "Hi", model="claude-9"))
    assert error.body["error"]["type"] == "not_found_error" and "claude-9" in str(error), error
    assert error.request_id == error.body["request_id"], error


def check_bad_requests(client):
    for more in (
        {"max_tokens": 0},
        {"extra_body": {"temperature": 99}},
        {"stop_sequences": [""]},
        {"thinking": {"type": "on"}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "Hi"}]},
    ):
        error = fails(anthropic.BadRequestError, lambda: client.messages.create(**(fields("Hi") | more)))
        assert error.body["error"]["type"] == "invalid_request_error", (more, error)


def check_too_long_prompt(client):
    error = fails(anthropic.BadRequestError, lambda: ask(client, "Rain is expected. " * 6000))
    assert "maximum context length" in str(error), error


def main():
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
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
