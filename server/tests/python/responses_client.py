"""Gets responses from a running server through the official `openai` package.

Usage: responses_client.py BASE_URL. Prints `ok NAME` for each check that holds; the first one that
does not ends the program with its traceback and exit code 1.
"""

import json
import sys

import openai

MODEL = "dsv4-mini"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather forecast of a city.",
    "strict": False,
    "parameters": {
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


def ask(client, items, **more):
    return client.responses.create(model=MODEL, input=items, temperature=0, **more)


def final(client, items, **more):
    """The response that the package puts together from a stream, and its events."""
    with client.responses.stream(model=MODEL, input=items, temperature=0, **more) as stream:
        events = list(stream)
        return stream.get_final_response(), events


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")


def check_response(client):
    response = ask(client, RECALL, metadata={"run": "1"})
    assert response.output_text == ANSWER, response
    assert (response.status, response.object, response.model) == ("completed", "response", MODEL), response
    assert response.id.startswith("resp_") and response.metadata == {"run": "1"}, response
    assert response.store is False, response
    usage = response.usage
    assert usage.input_tokens > 30 and usage.output_tokens > 5, usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
    assert usage.input_tokens_details.cached_tokens >= 0, usage


def check_items(client):
    items = [
        {"role": "user", "content": f"{FACTS}\n\nHi"},
        {"type": "message", "role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": [{"type": "input_text", "text": "What is the serial number of the Kyoto pump?"}]},
    ]
    response = ask(client, items, instructions="Answer from the records.")
    assert "90417" in response.output_text, response


def check_stream(client):
    whole = ask(client, "Count from 3 to 12.")
    response, events = final(client, "Count from 3 to 12.")
    assert response.output_text == whole.output_text, (response, whole)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] == "response.completed", kinds
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 3, deltas
    assert response.usage.output_tokens == whole.usage.output_tokens, response


def check_tools(client):
    response = ask(client, FORECAST, tools=[WEATHER])
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Lima", "days": 3}, call
    items = [{"role": "user", "content": FORECAST}]
    items += response.output
    items.append(
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "sunny", "celsius": 21}'}
    )
    answer = ask(client, items, tools=[WEATHER], store=False)
    assert answer.output_text == "It is sunny in Lima, 21 degrees.", answer


def check_tools_in_stream(client):
    response, events = final(client, FORECAST, tools=[WEATHER])
    [call] = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Lima", "days": 3}, call
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments, (deltas, call)


def check_tool_choice(client):
    none = ask(client, "Hello", tools=[WEATHER], tool_choice="none")
    assert none.output_text and [item.type for item in none.output] == ["message"], none
    forced = ask(client, FORECAST, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert [item.type for item in forced.output] == ["function_call"], forced


def check_reasoning(client):
    response = ask(client, RECALL, reasoning={"effort": "high"})
    thoughts = response.output[0]
    assert thoughts.type == "reasoning" and "55231" in thoughts.content[0].text, response
    assert response.output_text == ANSWER, response
    assert response.usage.output_tokens_details.reasoning_tokens > 0, response.usage
    streamed, _ = final(client, RECALL, reasoning={"effort": "high"})
    assert streamed.output[0].content[0].text == thoughts.content[0].text, streamed
    items = [{"role": "user", "content": RECALL}, *response.output]
    items.append({"role": "user", "content": "What is the serial number of the Kyoto pump?"})
    assert "90417" in ask(client, items).output_text, "after reasoning"
    assert [item.type for item in ask(client, RECALL).output] == ["message"], "reasons unasked"


def check_max_output_tokens(client):
    response = ask(client, "Count from 3 to 12.", max_output_tokens=4)
    assert response.status == "incomplete" and response.usage.output_tokens == 4, response
    assert response.incomplete_details.reason == "max_output_tokens", response


def check_json_format(client):
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False}
    assert ask(client, "Hello", text={"format": schema}).status == "completed"


def check_structured_output(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["yes", "no"]}},
        "required": ["ok", "word"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "name": "v", "schema": schema, "strict": True}
    response = ask(client, "Hi", text={"format": format}, max_output_tokens=100)
    verdict = json.loads(response.output_text)
    assert isinstance(verdict["ok"], bool) and verdict["word"] in ("yes", "no"), verdict


def check_logprobs(client):
    response = ask(client, "Hi", top_logprobs=2, include=["message.output_text.logprobs"])
    part = response.output[0].content[0]
    assert "".join(token.token for token in part.logprobs) == part.text, part
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs), part


def check_nothing_is_stored(client):
    first = ask(client, "Hello", store=True)
    error = fails(openai.BadRequestError, lambda: ask(client, "Hi", previous_response_id=first.id))
    assert error.param == "previous_response_id" and "send the earlier items" in error.message, error
    fails(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


def check_unknown_model(client):
    call = lambda: client.responses.create(model="gpt-9", input="Hi")
    error = fails(openai.NotFoundError, call)
    assert error.code == "model_not_found" and "gpt-9" in error.message, error


def check_bad_requests(client):
    for more, param in (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 99}, "temperature"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools"),
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "Hi"}]}, "input[0]"),
        ({"background": True}, "background"),
    ):
        asked = {"model": MODEL, "input": "Hi"} | more
        error = fails(openai.BadRequestError, lambda: client.responses.create(**asked))
        assert error.param == param, (more, error)


def check_too_long_prompt(client):
    error = fails(openai.BadRequestError, lambda: ask(client, "Rain is expected. " * 6000))
    assert error.code == "context_length_exceeded" and error.param == "input", error


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
