//! Just enough of Rust's lexical grammar to tell code from comments and strings.

/// A source file with its code and its comments apart, line for line.
#[derive(Debug)]
pub(crate) struct Masked {
    /// The source with comments, strings and character literals blanked.
    pub(crate) code: String,
    /// The source with everything but comments blanked.
    pub(crate) comments: String,
}

/// A function with a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Function {
    /// Its name.
    pub(crate) name: String,
    /// Line of the `fn` keyword, from 1.
    pub(crate) line: usize,
    /// Lines from the keyword to the closing brace, both counted.
    pub(crate) lines: usize,
}

/// Splits `source`; both halves keep its line breaks.
pub(crate) fn mask(source: &str) -> Masked {
    let chars: Vec<char> = source.chars().collect();
    let mut out = Masked { code: String::new(), comments: String::new() };
    let mut at = 0;
    while at < chars.len() {
        let (end, part) = token(&chars, at);
        for &c in &chars[at..end] {
            let blank = if c == '\n' { '\n' } else { ' ' };
            out.code.push(if part == Part::Code { c } else { blank });
            out.comments.push(if part == Part::Comment { c } else { blank });
        }
        at = end;
    }
    out
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Code,
    Comment,
    Literal,
}

/// End and nature of what starts at `at`; code is taken one character or one word at a time.
fn token(chars: &[char], at: usize) -> (usize, Part) {
    let next = chars.get(at + 1).copied();
    match chars[at] {
        '/' if next == Some('/') => (find(chars, at, '\n'), Part::Comment),
        '/' if next == Some('*') => (block_comment(chars, at), Part::Comment),
        '"' => (string(chars, at + 1), Part::Literal),
        '\'' => quote(chars, at),
        c if is_word(c) => word(chars, at),
        _ => (at + 1, Part::Code),
    }
}

fn find(chars: &[char], from: usize, wanted: char) -> usize {
    (from..chars.len()).find(|&i| chars[i] == wanted).unwrap_or(chars.len())
}

fn block_comment(chars: &[char], at: usize) -> usize {
    let (mut i, mut depth) = (at + 2, 1);
    while i < chars.len() && depth > 0 {
        match (chars[i], chars.get(i + 1)) {
            ('/', Some('*')) => (i, depth) = (i + 2, depth + 1),
            ('*', Some('/')) => (i, depth) = (i + 2, depth - 1),
            _ => i += 1,
        }
    }
    i.min(chars.len())
}

/// End of a string whose opening quote lies before `i`.
fn string(chars: &[char], mut i: usize) -> usize {
    while i < chars.len() && chars[i] != '"' {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(chars.len())
}

/// A character literal, or the quote of a lifetime.
fn quote(chars: &[char], at: usize) -> (usize, Part) {
    if chars.get(at + 1) == Some(&'\\') {
        return ((find(chars, at + 3, '\'') + 1).min(chars.len()), Part::Literal);
    }
    if chars.get(at + 2) == Some(&'\'') {
        return (at + 3, Part::Literal);
    }
    (at + 1, Part::Code)
}

/// A word of code, or a string with a prefix such as `r#"`, `b"` or `c"`.
fn word(chars: &[char], at: usize) -> (usize, Part) {
    let end = (at..chars.len()).find(|&i| !is_word(chars[i])).unwrap_or(chars.len());
    let text: String = chars[at..end].iter().collect();
    let hashes = chars[end..].iter().take_while(|&&c| c == '#').count();
    let opens = chars.get(end + hashes) == Some(&'"');
    match text.as_str() {
        "r" | "br" | "cr" if opens => (raw_string(chars, end + hashes + 1, hashes), Part::Literal),
        "b" | "c" if opens && hashes == 0 => (string(chars, end + 1), Part::Literal),
        _ => (end, Part::Code),
    }
}

fn raw_string(chars: &[char], mut i: usize, hashes: usize) -> usize {
    while i < chars.len() {
        i = find(chars, i, '"') + 1;
        if (0..hashes).all(|k| chars.get(i + k) == Some(&'#')) {
            return (i + hashes).min(chars.len());
        }
    }
    chars.len()
}

/// True for characters of identifiers and keywords.
pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Byte positions at which `word` stands in `text` as a whole word.
pub(crate) fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = text[..at].chars().next_back().is_some_and(is_word);
        let after = text[at + word.len()..].chars().next().is_some_and(is_word);
        !before && !after
    })
}

/// Line number of a byte position, from 1.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// Every function with a body in masked code, inner ones too.
pub(crate) fn functions(code: &str) -> Vec<Function> {
    let mut found = Vec::new();
    for at in words(code, "fn") {
        let rest = code[at + 2..].trim_start();
        let name: String = rest.chars().take_while(|&c| is_word(c)).collect();
        if name.is_empty() {
            continue;
        }
        if let Some(end) = body_end(&code[at..]) {
            let lines = code[at..at + end].matches('\n').count() + 1;
            found.push(Function { name, line: line_of(code, at), lines });
        }
    }
    found
}

/// Length of the text from `fn` to the closing brace; `None` for a function without body.
fn body_end(code: &str) -> Option<usize> {
    let (mut round, mut curly) = (0_usize, 0_usize);
    for (i, c) in code.char_indices() {
        match c {
            '(' | '[' => round += 1,
            ')' | ']' => round = round.saturating_sub(1),
            ';' if round == 0 && curly == 0 => return None,
            '{' => curly += 1,
            '}' => {
                curly = curly.saturating_sub(1);
                if curly == 0 && round == 0 {
                    return Some(i + 1);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_not_code() {
        let source =
            "let a = \"x // fn\"; // fn note\nlet b = r#\"y \" fn\"#; /* fn /* in */ */ c()";
        let masked = mask(source);
        assert_eq!(words(&masked.code, "fn").count(), 0);
        assert!(masked.code.contains("c()"));
        assert_eq!(masked.comments.matches("fn").count(), 2);
        assert_eq!(masked.code.len(), source.len());
    }

    #[test]
    fn lifetimes_and_character_literals_are_told_apart() {
        let masked = mask("fn f<'a>(x: &'a str) { if c == '{' || c == '\\'' { g(b\"}\", '\"') } }");
        assert_eq!(masked.code.matches('{').count(), 2);
        assert_eq!(masked.code.matches('}').count(), 2);
        assert!(masked.code.contains("&'a str"));
    }

    #[test]
    fn functions_are_measured_to_their_closing_brace() {
        let code = "trait T { fn without(&self); }\nfn one() {}\nfn two(a: [u8; 3])\nwhere X: Y\n{\n  {}\n}\ntype F = fn(u8);\n";
        let found = functions(&mask(code).code);
        let short: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.line, f.lines)).collect();
        assert_eq!(short, [("one", 2, 1), ("two", 3, 5)]);
    }

    #[test]
    fn whole_words_only() {
        assert_eq!(words("unsafe_code unsafe { not_unsafe }", "unsafe").collect::<Vec<_>>(), [12]);
    }

    #[test]
    fn unfinished_input_ends_quietly() {
        for source in ["\"abc", "r#\"abc", "/* abc", "'\\", "b\"", "'", "\"\\"] {
            assert_eq!(mask(source).code.chars().count(), source.chars().count(), "{source}");
        }
    }
}
