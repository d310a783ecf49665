//! The prompt of a request as the router sees it: blocks of what was sent, hashed one after the
//! other. Nothing is rendered or tokenised; what is equal there is equal to the worker too.

use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::io;

/// Bytes of a block: about the 256 tokens that a worker keeps as one.
pub const BLOCK_BYTES: usize = 1024;
/// Most blocks of a prompt that are hashed; what follows them counts, and is not remembered.
pub const BLOCKS_MAX: usize = 4096;

/// Key of the hashes: users choose what is hashed, and must not find two prompts with one hash.
#[derive(Clone, Copy)]
pub struct HashKey(pub [u8; 32]);

impl fmt::Debug for HashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashKey(..)")
    }
}

/// Whose request it is, apart from what its body says: the headers that hold an API key. What one
/// has sent does not show in where the requests of another go.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tenant<'a> {
    /// `Authorization`.
    pub authorization: &'a [u8],
    /// `X-Api-Key`, of Anthropic's clients.
    pub api_key: &'a [u8],
}

/// The fields of any of the APIs that a worker renders into its prompt. Of the wrong type or not:
/// whether a request is good is the worker's to say.
#[derive(Debug, Default, Deserialize)]
struct Body {
    model: Option<Value>,
    user: Option<Value>,
    metadata: Option<Value>,
    cache_salt: Option<Value>,
    system: Option<Value>,
    instructions: Option<Value>,
    tools: Option<Value>,
    messages: Option<Value>,
    prompt: Option<Value>,
    input: Option<Value>,
    text: Option<Value>,
    input_ids: Option<Value>,
}

/// A prompt in blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    blocks: u32,
    chain: Vec<u64>,
}

impl Prompt {
    /// Of a request without one, which costs no worker anything.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Of a request's body. What is no JSON object has one block that is never remembered.
    #[must_use]
    pub fn of(key: &HashKey, tenant: Tenant<'_>, body: &[u8]) -> Self {
        let Ok(body) = serde_json::from_slice::<Body>(body) else {
            return Self { blocks: 1, chain: Vec::new() };
        };
        let mut blocks = Blocks::new(key, &root(key, tenant, &body));
        // As a prompt has them: what is said once comes before what grows by the turn.
        for part in [&body.system, &body.instructions, &body.tools].into_iter().flatten() {
            blocks.json(part);
        }
        let growing = [&body.messages, &body.prompt, &body.input, &body.text, &body.input_ids];
        for part in growing.into_iter().flatten() {
            match part {
                Value::Array(items) => blocks.items(items),
                Value::String(text) => blocks.bytes(text.as_bytes()),
                other => blocks.json(other),
            }
        }
        blocks.end()
    }

    /// Blocks, also one that is not full.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// A hash for each full block: of the prompt up to its end.
    #[must_use]
    pub fn chain(&self) -> &[u64] {
        &self.chain
    }
}

/// What the chain of a prompt begins with: equal for those who may share what was computed.
fn root(key: &HashKey, tenant: Tenant<'_>, body: &Body) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_keyed(&key.0);
    let mut add = |part: &[u8]| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    };
    add(tenant.authorization);
    add(tenant.api_key);
    let user = body.metadata.as_ref().and_then(|metadata| metadata.get("user_id"));
    for field in [body.model.as_ref(), body.user.as_ref(), user, body.cache_salt.as_ref()] {
        add(field.map(Value::to_string).unwrap_or_default().as_bytes());
    }
    hasher.finalize().into()
}

/// Cuts what is written into blocks.
struct Blocks<'a> {
    key: &'a HashKey,
    parent: [u8; 32],
    open: Vec<u8>,
    prompt: Prompt,
}

impl<'a> Blocks<'a> {
    fn new(key: &'a HashKey, root: &[u8; 32]) -> Self {
        let open = Vec::with_capacity(BLOCK_BYTES);
        Self { key, parent: *root, open, prompt: Prompt::default() }
    }

    fn bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.open.len()));
            self.open.extend_from_slice(now);
            bytes = later;
            if self.open.len() == BLOCK_BYTES {
                self.close();
            }
        }
    }

    fn close(&mut self) {
        // A body has far fewer than 2^32 blocks.
        self.prompt.blocks = self.prompt.blocks.saturating_add(1);
        if self.prompt.chain.len() < BLOCKS_MAX {
            let mut hasher = blake3::Hasher::new_keyed(&self.key.0);
            hasher.update(&self.parent);
            hasher.update(&self.open);
            self.parent = hasher.finalize().into();
            let [a, b, c, d, e, f, g, h, ..] = self.parent;
            self.prompt.chain.push(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
        }
        self.open.clear();
    }

    /// Items of a list one after the other, so that a longer list begins like a shorter one. Token
    /// ids have four bytes, as a token of text has about.
    fn items(&mut self, items: &[Value]) {
        let id = |item: &Value| item.as_u64().and_then(|id| u32::try_from(id).ok());
        for item in items {
            match id(item) {
                Some(id) => self.bytes(&id.to_le_bytes()),
                None => self.json(item),
            }
        }
    }

    fn json(&mut self, value: &Value) {
        // Writing to memory cannot go wrong, and a value that was parsed can be written.
        let _ = serde_json::to_writer(&mut *self, value);
        self.bytes(b"\n");
    }

    fn end(mut self) -> Prompt {
        if !self.open.is_empty() || self.prompt.blocks == 0 {
            self.prompt.blocks = self.prompt.blocks.saturating_add(1);
        }
        self.prompt
    }
}

impl io::Write for Blocks<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
