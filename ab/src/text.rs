//! Text that a model has to know by heart: facts, what surrounds them, and tools that need them.
//!
//! The words are those that the mini model was trained on; any model of size reads them as well.

use crate::judge::Truth;
use crate::rng::Rng;
use serde_json::{Value, json};

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
const STATES: &str = "shipped packed lost delivered paid";

/// Something that only the text says.
#[derive(Clone, Debug)]
pub(crate) struct Fact {
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

    pub(crate) fn question(&self, rng: &mut Rng) -> String {
        let Self { noun, subject, .. } = self;
        match rng.below(3) {
            0 => format!("What is the {noun} of {subject}?"),
            1 => format!("Tell me the {noun} of {subject}."),
            _ => format!("I need the {noun} of {subject}."),
        }
    }

    pub(crate) fn answer(&self) -> String {
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

/// A text of about `words` words; adds its facts to those known so far. At least one is new.
pub(crate) fn write(rng: &mut Rng, words: usize, facts: &mut Vec<Fact>) -> String {
    let (mut lines, mut size, before) = (Vec::new(), 0, facts.len());
    while size < words || facts.len() == before {
        let line = if rng.below(10) < 4 || facts.len() == before {
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
        size += line.split(' ').count();
        lines.push(line);
    }
    lines.join(" ")
}

/// One question, and what follows a tool call that it leads to.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub(crate) ask: String,
    pub(crate) truth: Truth,
    /// Result of the tool, if one is called, and the right answer to that.
    pub(crate) after: Option<(String, String)>,
}

/// A question about the facts.
pub(crate) fn question(rng: &mut Rng, facts: &[Fact]) -> Question {
    let fact = facts[rng.below(facts.len())].clone();
    match rng.below(4) {
        0 => weather(rng),
        1 if fact.noun == "order number" => order(rng, &fact),
        1 | 2 if fact.noun != "order number" => unlock(rng, &fact),
        _ => recall(rng, &fact),
    }
}

/// A question whose answer is a fact, word by word.
pub(crate) fn recall(rng: &mut Rng, fact: &Fact) -> Question {
    Question { ask: fact.question(rng), truth: Truth::Says(fact.answer()), after: None }
}

fn weather(rng: &mut Rng) -> Question {
    let (city, days) = (rng.word(CITIES), 1 + rng.below(9));
    let (sky, degrees) = (rng.word(SKY), rng.below(40));
    Question {
        ask: format!("What will the weather be in {city} for the next {days} days?"),
        truth: Truth::Calls("get_weather".to_owned(), json!({"city": city, "days": days})),
        after: Some((
            format!("{{\"sky\": \"{sky}\", \"celsius\": {degrees}}}"),
            format!("It is {sky} in {city}, {degrees} degrees."),
        )),
    }
}

fn order(rng: &mut Rng, fact: &Fact) -> Question {
    let (value, day, state) = (&fact.value, rng.word(DAYS), rng.word(STATES));
    Question {
        ask: format!("Look up the order of {}.", fact.subject),
        truth: Truth::Calls("lookup_order".to_owned(), json!({"order_id": value})),
        after: Some((
            format!("{{\"status\": \"{state}\", \"day\": \"{day}\"}}"),
            format!("Order {value} is {state}, since {day}."),
        )),
    }
}

fn unlock(rng: &mut Rng, fact: &Fact) -> Question {
    let target = fact.subject.strip_prefix("the ").unwrap_or(&fact.subject);
    let opens = rng.below(5) > 0;
    let mut characters = target.chars();
    let head = characters.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    let after = if opens {
        format!("{head}{} is unlocked.", characters.as_str())
    } else {
        format!("The code {} was refused.", fact.value)
    };
    Question {
        ask: format!("Unlock {}.", fact.subject),
        truth: Truth::Calls("unlock".to_owned(), json!({"target": target, "code": fact.value})),
        after: Some((format!("{{\"ok\": {opens}}}"), after)),
    }
}

/// The tools, in the form of Chat Completions.
pub(crate) fn tools() -> Value {
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
