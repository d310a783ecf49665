//! Conversations that the mini model can hold: facts to recall from a long text and tools to call,
//! in the words it was trained on. Everything follows from a seed.

use dsv4_model::text::Tokenizer;
use serde_json::{Value, json};

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    /// Next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    fn word(&mut self, of: &str) -> String {
        let words: Vec<&str> = of.split(' ').collect();
        (*self.pick(&words)).to_owned()
    }
}

const CITIES: &str = "Oslo Lisbon Cairo Lima Quito Dublin Tokyo Kyoto Hanoi Delhi Accra Lagos Tunis \
    Riga Vilnius Warsaw Prague Vienna Zurich Geneva Milan Turin Naples Madrid Seville Porto Paris Lyon";
const NAMES: &str = "Ada Alan Amir Anna Aria Ben Bela Carl Cora Dara Dev Dina Edda Egon Elsa Emil Enzo \
    Erik Esme Eva Finn Fay Gala Gita Gus Hana Hugo Ida Igor Ines Ivan Iris Jade Jan Jo Juno Kai Kira";
const THINGS: &str = "vault locker engine boiler server router printer camera drone sensor turbine \
    reactor pump valve tank silo crane truck ferry barge wagon tram kiosk lamp beacon antenna radar";
const COLOURS: &str =
    "red green blue amber violet silver golden black white grey crimson teal ivory";
const DAYS: &str = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday";
const SKY: &str = "sunny cloudy rainy windy foggy snowy clear stormy";

/// A fact of the text.
#[derive(Clone, Debug)]
struct Fact {
    noun: &'static str,
    subject: String,
    value: String,
}

impl Fact {
    fn new(rng: &mut Rng) -> Self {
        let (noun, subject) = match rng.below(4) {
            0 => (
                "code",
                format!("the {} {} in {}", rng.word(COLOURS), rng.word(THINGS), rng.word(CITIES)),
            ),
            1 => ("order number", format!("{} from {}", rng.word(NAMES), rng.word(CITIES))),
            2 => ("access key", format!("the {} of {}", rng.word(THINGS), rng.word(NAMES))),
            _ => ("serial number", format!("the {} {}", rng.word(CITIES), rng.word(THINGS))),
        };
        let digits = 4 + rng.below(4);
        let value = (0..digits).map(|_| char::from(b'0' + rng.below(10) as u8)).collect();
        Self { noun, subject, value }
    }

    fn statement(&self, rng: &mut Rng) -> String {
        let Self { noun, subject, value } = self;
        match rng.below(3) {
            0 => format!("The {noun} of {subject} is {value}."),
            1 => format!("Note: {noun} of {subject}: {value}."),
            _ => format!("{value} is the {noun} of {subject}."),
        }
    }

    fn question(&self, rng: &mut Rng) -> String {
        let Self { noun, subject, .. } = self;
        match rng.below(3) {
            0 => format!("What is the {noun} of {subject}?"),
            1 => format!("Tell me the {noun} of {subject}."),
            _ => format!("I need the {noun} of {subject}."),
        }
    }

    fn answer(&self) -> String {
        format!("The {} of {} is {}.", self.noun, self.subject, self.value)
    }
}

fn filler(rng: &mut Rng) -> String {
    let (city, day, thing) = (rng.word(CITIES), rng.word(DAYS), rng.word(THINGS));
    let (name, other, colour) = (rng.word(NAMES), rng.word(NAMES), rng.word(COLOURS));
    match rng.below(6) {
        0 => format!("The {colour} {thing} near {city} was painted last {day}."),
        1 => format!("{name} walked past the {thing} without a word."),
        2 => format!("Rain is expected in {city} on {day}."),
        3 => format!("{name} and {other} met by the {colour} {thing} to talk about the harvest."),
        4 => format!("A {colour} flag hung over the {thing} all day."),
        _ => format!("The inspector counted {} crates beside the {thing}.", 2 + rng.below(98)),
    }
}

/// Writes a text of about `tokens` tokens and adds its facts to those known so far.
fn write(rng: &mut Rng, tokenizer: &Tokenizer, tokens: usize, facts: &mut Vec<Fact>) -> String {
    let (mut lines, mut size) = (Vec::new(), 0);
    while size < tokens {
        let line = if rng.below(10) < 4 || facts.is_empty() {
            let fact = Fact::new(rng);
            // Of two facts with one subject the question would have two answers.
            if facts.iter().any(|known| known.subject == fact.subject) {
                continue;
            }
            let line = fact.statement(rng);
            facts.push(fact);
            line
        } else {
            filler(rng)
        };
        size += count(tokenizer, &line);
        lines.push(line);
    }
    lines.join(" ")
}

fn count(tokenizer: &Tokenizer, text: &str) -> usize {
    tokenizer.encode_plain(text).expect("plain text is encoded").len()
}

/// What a right answer looks like.
#[derive(Clone, Debug)]
pub(crate) enum Truth {
    /// This text.
    Says(String),
    /// A call of this tool with these arguments.
    Calls(&'static str, Value),
}

impl Truth {
    /// Whether the message of an answer is right.
    pub(crate) fn is(&self, message: &Value) -> bool {
        match self {
            Self::Says(text) => message["content"].as_str().map(str::trim) == Some(text),
            Self::Calls(name, arguments) => {
                let call = &message["tool_calls"][0]["function"];
                let given =
                    call["arguments"].as_str().and_then(|a| serde_json::from_str::<Value>(a).ok());
                call["name"] == *name && given.as_ref() == Some(arguments)
            }
        }
    }
}

/// One question, and what follows a tool call that it leads to.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// What the user says.
    pub(crate) ask: String,
    /// A right answer.
    pub(crate) truth: Truth,
    /// Result of the tool, if one is called.
    pub(crate) result: String,
    /// A right answer to that.
    pub(crate) after: Truth,
}

/// A conversation before anything was said.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    /// System message, may be empty.
    pub(crate) system: &'static str,
    /// Tools in the API's form.
    pub(crate) tools: Value,
    /// Turns; half of the text is in the first, the others bring the rest.
    pub(crate) turns: Vec<Turn>,
}

impl Session {
    /// A session of `turns` turns that grows to about `tokens` tokens.
    pub(crate) fn new(seed: u64, tokenizer: &Tokenizer, tokens: usize, turns: usize) -> Self {
        let mut rng = Rng(seed);
        let tools = tools();
        let around = count(tokenizer, &tools.to_string()) + 260 + turns * 60;
        let text = tokens.saturating_sub(around).max(60);
        let mut facts = Vec::new();
        let mut next = |n: usize| {
            let share = if n == 0 { text / 2 } else { text / 2 / (turns - 1) };
            let text = write(&mut rng, tokenizer, share, &mut facts);
            let turn = turn(&mut rng, &facts);
            Turn { ask: format!("{text}\n\n{}", turn.ask), ..turn }
        };
        let turns = (0..turns).map(&mut next).collect();
        let systems = ["", "You are a helpful assistant.", "Answer from the records."];
        Self { system: systems[rng.below(systems.len())], tools, turns }
    }

    /// Messages before the first turn.
    pub(crate) fn opening(&self) -> Vec<Value> {
        let system =
            (!self.system.is_empty()).then(|| json!({"role": "system", "content": self.system}));
        system.into_iter().collect()
    }
}

fn tools() -> Value {
    let tool = |name, description, properties: Value, required: Value| {
        let parameters = json!({"type": "object", "properties": properties, "required": required});
        json!({"type": "function", "function": {
            "name": name, "description": description, "parameters": parameters,
        }})
    };
    json!([
        tool(
            "get_weather",
            "Get the weather forecast of a city.",
            json!({"city": {"type": "string"}, "days": {"type": "integer"}}),
            json!(["city"])
        ),
        tool(
            "lookup_order",
            "Look up an order by its number.",
            json!({"order_id": {"type": "string", "description": "Order number"}}),
            json!(["order_id"])
        ),
        tool(
            "unlock",
            "Unlock something with its code.",
            json!({"target": {"type": "string"}, "code": {"type": "string"}}),
            json!(["target", "code"])
        ),
    ])
}

fn turn(rng: &mut Rng, facts: &[Fact]) -> Turn {
    let fact = rng.pick(facts).clone();
    match rng.below(4) {
        0 => weather(rng),
        1 if fact.noun == "order number" => order(rng, &fact),
        1 | 2 if fact.noun != "order number" => unlock(rng, &fact),
        _ => {
            let truth = Truth::Says(fact.answer());
            let result = json!({"ok": false}).to_string();
            Turn { ask: fact.question(rng), after: truth.clone(), truth, result }
        }
    }
}

fn weather(rng: &mut Rng) -> Turn {
    let (city, days) = (rng.word(CITIES), 1 + rng.below(9));
    let (sky, degrees) = (rng.word(SKY), rng.below(40));
    Turn {
        ask: format!("What will the weather be in {city} for the next {days} days?"),
        truth: Truth::Calls("get_weather", json!({"city": city, "days": days})),
        result: format!("{{\"sky\": \"{sky}\", \"celsius\": {degrees}}}"),
        after: Truth::Says(format!("It is {sky} in {city}, {degrees} degrees.")),
    }
}

fn order(rng: &mut Rng, fact: &Fact) -> Turn {
    let (value, day) = (&fact.value, rng.word(DAYS));
    let state = rng.word("shipped packed lost delivered paid");
    Turn {
        ask: format!("Look up the order of {}.", fact.subject),
        truth: Truth::Calls("lookup_order", json!({"order_id": value})),
        result: format!("{{\"status\": \"{state}\", \"day\": \"{day}\"}}"),
        after: Truth::Says(format!("Order {value} is {state}, since {day}.")),
    }
}

fn unlock(rng: &mut Rng, fact: &Fact) -> Turn {
    let target = fact.subject.strip_prefix("the ").unwrap_or(&fact.subject);
    let opens = rng.below(5) > 0;
    let (head, tail) = target.split_at(1);
    let after = if opens {
        format!("{}{tail} is unlocked.", head.to_uppercase())
    } else {
        format!("The code {} was refused.", fact.value)
    };
    Turn {
        ask: format!("Unlock {}.", fact.subject),
        truth: Truth::Calls("unlock", json!({"target": target, "code": fact.value})),
        result: format!("{{\"ok\": {opens}}}"),
        after: Truth::Says(after),
    }
}
