//! A streamed chat completion, put together from its events.

use crate::judge::Answer;
use serde_json::Value;

/// An answer on its way.
#[derive(Debug, Default)]
pub struct Assembly {
    buffer: Vec<u8>,
    /// Bytes so far.
    taken: usize,
    answer: Answer,
    is_done: bool,
    pieces: u32,
}

/// A stream that is none of a chat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The server says that the answer is lost.
    #[error("the stream ends with an error: {0}")]
    Failed(String),
    /// Not an event.
    #[error("an event cannot be read: {0}")]
    Malformed(String),
    /// Longer than any answer.
    #[error("an event has more than {0} bytes")]
    TooLong(usize),
    /// It does not end.
    #[error("the answer has more than {0} bytes")]
    Endless(usize),
}

/// Most bytes of one event.
const EVENT_MAX: usize = 4 << 20;
/// Most bytes of a stream.
const STREAM_MAX: usize = 64 << 20;

impl Assembly {
    /// Takes bytes as they come.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> Result<(), StreamError> {
        self.taken = self.taken.saturating_add(bytes.len());
        if self.taken > STREAM_MAX {
            return Err(StreamError::Endless(STREAM_MAX));
        }
        // Where nothing of what is there already can end a line.
        let from = self.buffer.len();
        self.buffer.extend_from_slice(bytes);
        if !self.buffer[from..].contains(&b'\n') {
            return self.check_event();
        }
        // All events here have one line of data, so a line is as good as an event. It may end with a
        // carriage return too, as the standard has it.
        let whole = self.buffer.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines: Vec<u8> = self.buffer.drain(..whole).collect();
        for line in lines.split(|byte| *byte == b'\n') {
            if let Some(data) = line.strip_prefix(b"data:") {
                self.handle_data(String::from_utf8_lossy(data).trim())?;
            }
        }
        self.check_event()
    }

    fn check_event(&self) -> Result<(), StreamError> {
        if self.buffer.len() > EVENT_MAX {
            return Err(StreamError::TooLong(EVENT_MAX));
        }
        Ok(())
    }

    fn handle_data(&mut self, data: &str) -> Result<(), StreamError> {
        if data == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_str(data)
            .map_err(|error| StreamError::Malformed(format!("{error}: {}", shortened(data))))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(StreamError::Failed(shortened(&error.to_string())));
        }
        if let (Some(prompt), Some(output)) =
            (event["usage"]["prompt_tokens"].as_u64(), event["usage"]["completion_tokens"].as_u64())
        {
            self.answer.usage = Some((prompt, output));
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            self.handle_choice(choice);
        }
        Ok(())
    }

    fn handle_choice(&mut self, choice: &Value) {
        // Streams have deltas, whole answers a message.
        let part = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
        let mut has_some = false;
        let mut add = |to: &mut String, value: &Value| {
            if let Some(text) = value.as_str().filter(|text| !text.is_empty()) {
                to.push_str(text);
                has_some = true;
            }
        };
        add(&mut self.answer.content, &part["content"]);
        // Servers differ in what they call it.
        add(&mut self.answer.reasoning, &part["reasoning_content"]);
        add(&mut self.answer.reasoning, &part["reasoning"]);
        for (place, call) in part["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let index = call["index"].as_u64().map_or(place, |index| index as usize);
            let calls = &mut self.answer.calls;
            if index >= calls.len() && calls.len() < 64 {
                calls.push((String::new(), String::new()));
            }
            let Some((name, arguments)) = calls.get_mut(index) else { continue };
            add(name, &call["function"]["name"]);
            add(arguments, &call["function"]["arguments"]);
        }
        self.pieces += u32::from(has_some);
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.answer.finish.push(reason.to_owned());
        }
        for entry in choice["logprobs"]["content"].as_array().into_iter().flatten() {
            self.answer.logprobs.extend(entry["logprob"].as_f64());
        }
    }

    /// Pieces of text or calls so far.
    #[must_use]
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// Takes a whole answer that was not streamed.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn handle_whole(&mut self, body: &[u8]) -> Result<(), StreamError> {
        self.handle_data(String::from_utf8_lossy(body).trim())?;
        self.is_done = true;
        Ok(())
    }

    /// What has come, of an answer that nobody waits for any more.
    #[must_use]
    pub fn so_far(self) -> Answer {
        self.answer
    }

    /// The answer; why there is none if the stream has ended before it.
    ///
    /// # Errors
    /// What is missing.
    pub fn finish(self) -> Result<Answer, String> {
        if !self.is_done {
            return Err("the stream ended without [DONE]".to_owned());
        }
        Ok(self.answer)
    }
}

/// The first characters of a text.
#[must_use]
pub fn shortened(text: &str) -> String {
    const MOST: usize = 300;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        ": keep-alive\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"Hm é\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"It \"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"is.\"},\"logprobs\":{\"content\":[{\"logprob\":-0.5}]}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"c\",\"function\":",
        "{\"name\":\"f\",\"arguments\":\"{\\\"a\\\"\"}}]}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\":1}\"}}]}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":5}}\n\n",
        "data: [DONE]\n\n",
    );

    fn expected() -> Answer {
        Answer {
            content: "It is.".to_owned(),
            reasoning: "Hm é".to_owned(),
            calls: vec![("f".to_owned(), "{\"a\":1}".to_owned())],
            finish: vec!["tool_calls".to_owned()],
            usage: Some((7, 5)),
            logprobs: vec![-0.5],
        }
    }

    #[test]
    fn a_stream_is_the_same_answer_wherever_it_is_cut() {
        let bytes = STREAM.as_bytes();
        for cut in 0..=bytes.len() {
            let mut assembly = Assembly::default();
            assembly.handle_bytes(&bytes[..cut]).unwrap();
            assembly.handle_bytes(&bytes[cut..]).unwrap();
            assert_eq!(assembly.pieces(), 5);
            assert_eq!(assembly.finish(), Ok(expected()), "cut at {cut}");
        }
    }

    #[test]
    fn lines_may_end_with_a_carriage_return() {
        let stream = STREAM.replace('\n', "\r\n");
        for cut in 0..=stream.len() {
            let mut assembly = Assembly::default();
            assembly.handle_bytes(&stream.as_bytes()[..cut]).unwrap();
            assembly.handle_bytes(&stream.as_bytes()[cut..]).unwrap();
            assert_eq!(assembly.finish(), Ok(expected()), "cut at {cut}");
        }
    }

    #[test]
    fn an_answer_that_does_not_end_is_given_up() {
        let event = format!("data: {{\"choices\":[],\"x\":\"{}\"}}\n\n", "a".repeat(1 << 20));
        let mut assembly = Assembly::default();
        let error = (0..100).find_map(|_| assembly.handle_bytes(event.as_bytes()).err());
        assert_eq!(error, Some(StreamError::Endless(STREAM_MAX)));
    }

    #[test]
    fn a_whole_answer_is_read_too() {
        let mut assembly = Assembly::default();
        let body = r#"{"choices":[{"message":{"content":"It is.","reasoning_content":"Hm é",
            "tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\"a\":1}"}}]},
            "finish_reason":"tool_calls","logprobs":{"content":[{"logprob":-0.5}]}}],
            "usage":{"prompt_tokens":7,"completion_tokens":5}}"#;
        assembly.handle_whole(body.as_bytes()).unwrap();
        assert_eq!(assembly.finish(), Ok(expected()));
    }

    #[test]
    fn an_answer_without_an_end_is_none() {
        let mut assembly = Assembly::default();
        let end = STREAM.len() - "data: [DONE]\n\n".len();
        assembly.handle_bytes(&STREAM.as_bytes()[..end]).unwrap();
        assert!(assembly.finish().is_err());
        let failed = b"data: {\"error\":{\"message\":\"a page was wrong\"}}\n\n";
        let failed = Assembly::default().handle_bytes(failed);
        assert!(
            matches!(failed, Err(StreamError::Failed(why)) if why.contains("a page was wrong"))
        );
        let broken = Assembly::default().handle_bytes(b"data: {\"choi\n\n");
        assert!(matches!(broken, Err(StreamError::Malformed(_))));
        let endless = Assembly::default().handle_bytes(&vec![b'x'; EVENT_MAX + 1]);
        assert_eq!(endless, Err(StreamError::TooLong(EVENT_MAX)));
    }
}
