//! What a refused request is told: which field, what was found, what is wanted, in JSON's words.

use crate::fake::Server;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Sends a request with one wrong field and compares the whole message.
async fn says(path: &str, cases: &[(Value, &str)]) {
    let server = Server::start().await;
    for (fields, message) in cases {
        let mut request = match path {
            CHAT => json!({"messages": [{"role": "user", "content": "hi"}]}),
            _ => json!({"prompt": "hi"}),
        };
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = server.client.post(path, &request).await;
        assert_eq!(answer.status, 400, "{fields}: {}", answer.text());
        assert_eq!(answer.json()["error"]["message"], *message, "{fields}");
    }
    assert!(server.engine.submitted.lock().unwrap().is_empty());
    server.finish().await;
}

#[tokio::test]
async fn wrong_numbers_are_told_their_true_range() {
    for path in [CHAT, COMPLETIONS] {
        says(
            path,
            &[
                (
                    json!({"temperature": "hot"}),
                    "temperature is a string, and must be a number from 0 to 2",
                ),
                (
                    json!({"temperature": 2.5}),
                    "temperature is 2.5, and must be a number from 0 to 2",
                ),
                (json!({"top_p": 0}), "top_p is 0, and must be a number above 0 and at most 1"),
                (json!({"top_p": 1.5}), "top_p is 1.5, and must be a number above 0 and at most 1"),
                (
                    json!({"top_p": []}),
                    "top_p is a list, and must be a number above 0 and at most 1",
                ),
                (
                    json!({"top_k": -2}),
                    "top_k is -2, and must be an integer from 1 up, or 0 or -1 for all tokens",
                ),
                (json!({"top_k": 1.5}), "top_k is 1.5, and must be an integer"),
                (json!({"min_p": -1}), "min_p is -1, and must be a number from 0 to 1"),
                (
                    json!({"repetition_penalty": 0}),
                    "repetition_penalty is 0, and must be a number from 0.01 to 100",
                ),
                (
                    json!({"presence_penalty": 3}),
                    "presence_penalty is 3, and must be a number from -2 to 2",
                ),
                (
                    json!({"frequency_penalty": {}}),
                    "frequency_penalty is an object, and must be a number from -2 to 2",
                ),
                (json!({"seed": 1.5}), "seed is 1.5, and must be a 64-bit integer"),
                (json!({"seed": "x"}), "seed is a string, and must be a 64-bit integer"),
                (json!({"max_tokens": 0}), "max_tokens is 0, and must be an integer from 1 up"),
                (
                    json!({"max_tokens": "9"}),
                    "max_tokens is a string, and must be an integer from 1 up",
                ),
                (json!({"n": 200}), "n is 200, and must be an integer from 1 to 128"),
                (json!({"n": true}), "n is a boolean, and must be an integer from 1 to 128"),
            ],
        )
        .await;
    }
}

#[tokio::test]
async fn wrong_lists_of_tokens_and_texts_are_told_what_an_entry_is() {
    let vocabulary = crate::fake::TOKENIZER.vocab_size();
    let last = vocabulary - 1;
    for path in [CHAT, COMPLETIONS] {
        says(
            path,
            &[
                (json!({"stop": 1}), "stop is a number, and must be a string or a list"),
                (json!({"stop": [{}]}), "stop[0] is an object, and must be a string"),
                (json!({"stop": ""}), "stop[0] has 0 bytes, and must have 1 to 4096"),
                (
                    json!({"stop_token_ids": [{}]}),
                    &format!("stop_token_ids has an object, and token ids are integers from 0 to {last}"),
                ),
                (
                    json!({"stop_token_ids": [vocabulary]}),
                    &format!("stop_token_ids has {vocabulary}, and token ids are integers from 0 to {last}"),
                ),
                (json!({"logit_bias": []}), "logit_bias is a list, and must be an object"),
                (
                    json!({"logit_bias": {"x": 1}}),
                    &format!("logit_bias has the key \"x\", and keys must be token ids: integers from 0 to {last}"),
                ),
                (
                    json!({"logit_bias": {"1": "a"}}),
                    "logit_bias[\"1\"] is a string, and must be a number from -100 to 100",
                ),
                (
                    json!({"ignore_eos": "no"}),
                    "ignore_eos is a string, and must be true or false",
                ),
                (json!({"model": 7}), "model is 7, and must be a string"),
                (json!({"stream": "yes"}), "stream is a string, and must be true or false"),
            ],
        )
        .await;
    }
}

#[tokio::test]
async fn wrong_chat_options_are_told_without_names_of_the_source_code() {
    says(
        CHAT,
        &[
            (json!({"thinking": true}), "thinking is a boolean, and must be an object"),
            (json!({"thinking": {}}), "thinking.type is missing"),
            (
                json!({"thinking": {"type": "on"}}),
                "thinking.type is \"on\", and must be one of enabled, disabled, adaptive",
            ),
            (
                json!({"thinking": {"type": "enabled", "budget_tokens": -1}}),
                "thinking.budget_tokens is -1, and must be an integer from 0 up",
            ),
            (
                json!({"reasoning_effort": "huge"}),
                "reasoning_effort is \"huge\", and must be one of none, minimal, low, medium, high, \
                 xhigh, ultra, max",
            ),
            (json!({"reasoning_effort": 3}), "reasoning_effort is 3, and must be a string"),
            (
                json!({"chat_template_kwargs": {"thinking": 1}}),
                "chat_template_kwargs.thinking is 1, and must be true or false",
            ),
            (json!({"response_format": "json"}), "response_format is a string, and must be an object"),
            (
                json!({"response_format": {"type": "xml"}}),
                "response_format.type is \"xml\", and must be one of text, json_object, json_schema, regex",
            ),
            (
                json!({"response_format": {"type": "json_schema"}}),
                "response_format.json_schema is missing",
            ),
        ],
    )
    .await;
}

#[tokio::test]
async fn wrong_tools_and_stream_options_are_told_their_place() {
    let tool = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    says(
        CHAT,
        &[
            (json!({"tools": {}}), "tools is an object, and must be a list"),
            (json!({"tools": ["f"]}), "tools[0] is a string, and must be an object"),
            (
                json!({"tools": [{"type": "f"}]}),
                "tools[0].type is \"f\", and must be one of function",
            ),
            (tool(Value::Null), "tools[0].function is missing"),
            (tool(json!({"name": 1})), "tools[0].function.name is 1, and must be a string"),
            (
                tool(json!({"name": "f", "parameters": "x"})),
                "tools[0].function.parameters is a string, and must be an object",
            ),
            (
                json!({"tool_choice": "maybe"}),
                "tool_choice is \"maybe\", and must be one of none, auto, required, or an object \
                 that names a function",
            ),
            (json!({"tool_choice": 1}), "tool_choice is 1, and must be a string or an object"),
            (json!({"tool_choice": {"type": "function"}}), "tool_choice.function is missing"),
            (
                json!({"parallel_tool_calls": 1}),
                "parallel_tool_calls is 1, and must be true or false",
            ),
            (
                json!({"stream": true, "stream_options": []}),
                "stream_options is a list, and must be an object",
            ),
            (
                json!({"stream": true, "stream_options": {"include_usage": 1}}),
                "stream_options.include_usage is 1, and must be true or false",
            ),
            (
                json!({"logprobs": true, "top_logprobs": 21}),
                "top_logprobs is 21, and must be an integer from 0 to 20",
            ),
            (json!({"logprobs": 5}), "logprobs is 5, and must be true or false"),
        ],
    )
    .await;
}

#[tokio::test]
async fn wrong_messages_are_told_their_place() {
    let one = |message: Value| json!({"messages": [message]});
    let call = |function: Value| {
        let calls = json!([{"id": "a", "type": "function", "function": function}]);
        one(json!({"role": "assistant", "tool_calls": calls}))
    };
    says(
        CHAT,
        &[
            (json!({"messages": null}), "messages is missing"),
            (json!({"messages": "hi"}), "messages is a string, and must be a list"),
            (one(json!("hi")), "messages[0] is a string, and must be an object"),
            (one(json!({"content": "a"})), "messages[0].role is missing"),
            (one(json!({"role": 1})), "messages[0].role is 1, and must be a string"),
            (
                one(json!({"role": "robot", "content": "a"})),
                "messages[0].role is \"robot\", and must be one of system, user, assistant, tool, \
                 latest_reminder",
            ),
            (one(json!({"role": "user"})), "messages[0].content is missing"),
            (
                one(json!({"role": "user", "content": {}})),
                "messages[0].content is an object, and must be a string or a list",
            ),
            (
                one(json!({"role": "user", "content": ["a"]})),
                "messages[0].content[0] is a string, and must be an object",
            ),
            (
                one(json!({"role": "user", "content": [{"type": "audio"}]})),
                "messages[0].content[0].type is \"audio\", and must be one of text, image_url, file",
            ),
            (
                one(json!({"role": "user", "content": [{"type": "text"}]})),
                "messages[0].content[0].text is missing",
            ),
            (
                call(json!({"name": "f", "arguments": {}})),
                "messages[0].tool_calls[0].function.arguments is an object, and must be a string",
            ),
            (
                one(json!({"role": "tool", "content": "a"})),
                "messages[0].tool_call_id is missing",
            ),
        ],
    )
    .await;
}

#[tokio::test]
async fn wrong_completion_fields_are_told_what_is_wanted() {
    says(
        COMPLETIONS,
        &[
            (json!({"prompt": null}), "prompt is missing"),
            (json!({"prompt": {}}), "prompt is an object, and must be a string or token ids"),
            (json!({"prompt": []}), "prompt is empty"),
            (json!({"prompt": ["a", "b"]}), "prompt has 2 entries, and one is served"),
            (
                json!({"logprobs": true}),
                "logprobs is a boolean, and must be an integer from 0 to 20",
            ),
            (
                json!({"echo": true, "logprobs": 0}),
                "echo with logprobs is not supported: the prompt has no log probabilities",
            ),
            (
                json!({"best_of": 3}),
                "best_of is 3, and answers are not ranked here: it can be left out, or be n",
            ),
            (
                json!({"add_special_tokens": 1}),
                "add_special_tokens is 1, and must be true or false",
            ),
        ],
    )
    .await;
}
