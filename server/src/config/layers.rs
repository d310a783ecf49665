//! Flags from a file and from the environment, below those of the command line.
//!
//! Each flag comes from one place, the first that has it: the command line, the variable
//! `DSV4_` and its name in capitals (`DSV4_MAX_RUNNING_REQUESTS`), the file of `--config` (or
//! `DSV4_CONFIG`), its default. A list is taken whole from there.
//!
//! The file is TOML. Its keys are the flags' names, those of the router in a table `[router]`:
//!
//! ```toml
//! port = 30000
//! disaggregation-mode = "decode"
//! disaggregation-bootstrap = ["10.0.0.1:8998", "10.0.0.2:8998"]
//! default-thinking = true
//!
//! [router]
//! worker = ["http://10.0.0.3:30000"]
//! ```

use super::Cli;
use crate::net::otlp::without_secrets;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, CommandFactory as _, FromArgMatches as _};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

fn hint(near: Option<&str>) -> String {
    near.map_or_else(String::new, |near| format!("; is it {near}?"))
}

/// How variables begin that are no flags: of the hand-off's library, of tests and of benches.
const OTHER_VARIABLES: [&str; 9] = [
    "DSV4_UCX_LIB",
    "DSV4_TEST_",
    "DSV4_BENCH_",
    "DSV4_SIM_",
    "DSV4_FUZZ_",
    "DSV4_BLESS",
    "DSV4_MOTO_SERVER",
    "DSV4_OBJECT_STORE",
    "DSV4_ETCD",
];
/// How the name of a flag's variable begins.
const PREFIX: &str = "DSV4_";
/// Name of the flag that names the file.
const CONFIG: &str = "config";
/// How a router is told of its workers.
const NO_WORKERS: &str = "
a router passes requests on to workers: say where those are, or where they are found:
  server router --worker http://127.0.0.1:30002 --worker http://127.0.0.1:30003
  server router --discovery etcd://127.0.0.1:2379/prod
  server router --registry-port 30100      (workers: --discovery http://ROUTER:30100)
Workers are decode workers, or those of the modes both and null.
";
/// The subcommand that has a table of its own.
const ROUTER: &str = "router";

/// Where a flag comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The command line.
    CommandLine,
    /// A variable of the environment.
    Variable(String),
    /// A file.
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CommandLine => f.write_str("command line"),
            Self::Variable(name) => f.write_str(name),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A flag that is not left at its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name, without dashes.
    pub flag: String,
    /// Its values, as they were written; none of a switch.
    pub values: Vec<String>,
    /// Where they come from.
    pub source: Source,
}

impl Setting {
    /// Its values; what may be a secret is not shown.
    #[must_use]
    pub fn shown_values(&self) -> Vec<String> {
        let mut words = self.flag.split('-');
        let is_secret = words.clone().next_back() == Some("token")
            || words.any(|word| matches!(word, "key" | "keyfile" | "secret" | "password"));
        let shown = |value: &String| match is_secret {
            true => "...".to_owned(),
            false if is_url(value) => without_secrets(value),
            false => value.clone(),
        };
        self.values.iter().map(shown).collect()
    }
}

/// Whether a value is an address, which may have a password in it.
fn is_url(value: &str) -> bool {
    value.split_once("://").is_some_and(|(scheme, _)| scheme.chars().all(char::is_alphanumeric))
}

impl fmt::Display for Setting {
    /// As on a command line; what may be a secret is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--{}", self.flag)?;
        for value in self.shown_values() {
            write!(f, " {value}")?;
        }
        if self.source != Source::CommandLine {
            write!(f, " ({})", self.source)?;
        }
        Ok(())
    }
}

/// Why flags cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The command line, or a value that it got from elsewhere, is wrong; or help was asked for.
    #[error("{error}{}", note.as_deref().unwrap_or_default())]
    Usage {
        /// What clap says.
        error: clap::Error,
        /// Where a value of elsewhere came from.
        note: Option<String>,
    },
    /// Flags of the test build.
    #[cfg(feature = "faults")]
    #[error(transparent)]
    Faults(#[from] crate::faults::FlagError),
    /// The file cannot be read.
    #[error("--config {}: {error}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is no TOML.
    #[error("--config {}: {error}", path.display())]
    Syntax {
        /// Its path.
        path: PathBuf,
        /// What is wrong, and where.
        error: Box<toml::de::Error>,
    },
    /// The file has a key that is no flag.
    #[error("--config {}: {key} is not the name of a flag{}", path.display(), hint(near.as_deref()))]
    UnknownKey {
        /// Its path.
        path: PathBuf,
        /// The key.
        key: String,
        /// A flag that may be meant.
        near: Option<String>,
    },
    /// A file cannot name another one.
    #[error("--config {}: config cannot stand in a file", path.display())]
    Nested {
        /// Its path.
        path: PathBuf,
    },
    /// The value cannot be that of this flag.
    #[error("{origin}: --{flag} takes {wanted}, not {found}")]
    Kind {
        /// Where it comes from.
        origin: Source,
        /// The flag.
        flag: String,
        /// What it takes.
        wanted: &'static str,
        /// What was found.
        found: String,
    },
    /// A variable is no Unicode.
    #[error("{name} is not valid Unicode")]
    NotUnicode {
        /// Its name.
        name: String,
    },
}

/// Flags, and where those come from that are not left at their defaults.
#[derive(Debug)]
pub struct Layered {
    /// The flags.
    pub cli: Cli,
    /// Those of the command line, then the others.
    pub settings: Vec<Setting>,
    /// Variables that look like flags and are none, with what may be meant.
    pub unknown: Vec<String>,
}

/// Reads the flags of a process; `args` begins with its name.
///
/// # Errors
///
/// [`LayerError`]; that somebody asked for help is one too.
pub fn parse(
    args: impl IntoIterator<Item = OsString>,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Layered, LayerError> {
    let args: Vec<OsString> = args.into_iter().collect();
    let command = Cli::command();
    let name = args.get(1).and_then(|word| word.to_str());
    let chosen = name.and_then(|word| command.find_subcommand(word));
    if chosen.is_some() && name != Some(ROUTER) {
        // What looks after a folder has no flags that are worth keeping.
        return finish(&args, &BTreeMap::new(), Vec::new(), Vec::new());
    }
    let known = flags(chosen.unwrap_or(&command));
    let rest = &args[(1 + usize::from(chosen.is_some())).min(args.len())..];
    let given = given(&known, rest);
    let mut unknown = Vec::new();
    let all_known: Vec<String> = [&command, command.find_subcommand(ROUTER).unwrap_or(&command)]
        .into_iter()
        .flat_map(|command| flags(command).into_keys().map(str::to_owned))
        .collect();
    let mut below = from_variables(&known, &all_known, variables, &mut unknown)?;
    let named =
        given.get(CONFIG).cloned().flatten().or_else(|| below.get(CONFIG)?.values.first().cloned());
    below.remove(CONFIG);
    if let Some(path) = named {
        for (flag, setting) in from_file(&known, Path::new(&path), chosen.is_some())? {
            below.entry(flag).or_insert(setting);
        }
    }
    below.retain(|flag, _| !given.contains_key(flag));
    let mut all: Vec<OsString> = args[..args.len() - rest.len()].to_vec();
    for setting in below.values() {
        let flag = format!("--{}", setting.flag);
        match setting.values.as_slice() {
            [] => all.push(flag.into()),
            values => all.extend(values.iter().map(|value| format!("{flag}={value}").into())),
        }
    }
    all.extend_from_slice(rest);
    finish(&all, &known, below.into_values().collect(), unknown)
}

/// Parses what was put together.
fn finish(
    args: &[OsString],
    known: &BTreeMap<&str, &Arg>,
    below: Vec<Setting>,
    unknown: Vec<String>,
) -> Result<Layered, LayerError> {
    let usage = |error: clap::Error| {
        let note = origin(&error, &below).or_else(|| missing(&error));
        LayerError::Usage { error, note }
    };
    let mut matches = Cli::command().try_get_matches_from(args).map_err(usage)?;
    let mut settings = written(&matches, known, &below);
    let cli = Cli::from_arg_matches_mut(&mut matches).map_err(usage)?;
    settings.extend(below);
    Ok(Layered { cli, settings, unknown })
}

/// What was written on the command line itself.
fn written(
    matches: &clap::ArgMatches,
    known: &BTreeMap<&str, &Arg>,
    below: &[Setting],
) -> Vec<Setting> {
    let matches = matches.subcommand().map_or(matches, |(_, matches)| matches);
    let mut settings = Vec::new();
    for (flag, arg) in known {
        let id = arg.get_id().as_str();
        let is_written = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
        if !is_written || below.iter().any(|setting| setting.flag == *flag) {
            continue;
        }
        let values = matches.get_raw(id).into_iter().flatten();
        let values = match arg.get_action() {
            ArgAction::SetTrue => Vec::new(),
            _ => values.map(|value| value.to_string_lossy().into_owned()).collect(),
        };
        settings.push(Setting { flag: (*flag).to_owned(), values, source: Source::CommandLine });
    }
    settings
}

/// A line that says where a wrong value came from, if that was not the command line.
fn origin(error: &clap::Error, below: &[Setting]) -> Option<String> {
    let Some(ContextValue::String(arg)) = error.get(ContextKind::InvalidArg) else { return None };
    let flag = arg.split([' ', '=']).next()?.strip_prefix("--")?;
    let setting = below.iter().find(|setting| setting.flag == flag)?;
    Some(format!("--{flag} comes from {}\n", setting.source))
}

/// What to give where a router's workers are missing.
fn missing(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let is_missing = error.kind() == ErrorKind::MissingRequiredArgument
        && missing.iter().any(|argument| argument.starts_with("--worker "));
    is_missing.then(|| NO_WORKERS.to_owned())
}

/// Flags of a command by their long names.
fn flags(command: &Command) -> BTreeMap<&str, &Arg> {
    let named = command.get_arguments().filter_map(|arg| Some((arg.get_long()?, arg)));
    named.filter(|(name, _)| !matches!(*name, "help" | "version")).collect()
}

/// Which flags are on the command line, with the last value where it can be told.
fn given(known: &BTreeMap<&str, &Arg>, args: &[OsString]) -> BTreeMap<String, Option<String>> {
    let mut given = BTreeMap::new();
    let words: Vec<&str> = args.iter().map(|arg| arg.to_str().unwrap_or_default()).collect();
    for (n, word) in words.iter().enumerate() {
        let Some(word) = word.strip_prefix("--") else { continue };
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) => (flag, Some(value)),
            None => (word, words.get(n + 1).copied()),
        };
        if known.contains_key(flag) {
            given.insert(flag.to_owned(), value.map(str::to_owned));
        }
    }
    given
}

/// Flags of the environment. What is no flag of any program is noted: it may be a slip.
fn from_variables(
    known: &BTreeMap<&str, &Arg>,
    all_known: &[String],
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    unknown: &mut Vec<String>,
) -> Result<BTreeMap<String, Setting>, LayerError> {
    let mut found = BTreeMap::new();
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        let flag = name[PREFIX.len()..].to_ascii_lowercase().replace('_', "-");
        let Some(arg) = known.get(flag.as_str()) else {
            if !all_known.contains(&flag)
                && !OTHER_VARIABLES.iter().any(|other| name.starts_with(other))
            {
                let near = near(&flag, all_known.iter().map(String::as_str)).map(variable);
                unknown.push(format!("{name}{}", hint(near.as_deref())));
            }
            continue;
        };
        let not_unicode = || LayerError::NotUnicode { name: name.to_owned() };
        let value = OsStr::to_str(&value).ok_or_else(not_unicode)?;
        let source = Source::Variable(name.to_owned());
        let values = match arg.get_action() {
            // Several values have commas between them.
            ArgAction::Append => value.split(',').map(|value| value.trim().to_owned()).collect(),
            ArgAction::SetTrue => match value {
                "1" | "true" => Vec::new(),
                "0" | "false" | "" => continue,
                other => return Err(kind(source, &flag, "true or false", other)),
            },
            _ => vec![value.to_owned()],
        };
        found.insert(flag.clone(), Setting { flag, values, source });
    }
    Ok(found)
}

fn from_file(
    known: &BTreeMap<&str, &Arg>,
    path: &Path,
    is_router: bool,
) -> Result<Vec<(String, Setting)>, LayerError> {
    let read = std::fs::read_to_string(path);
    let text = read.map_err(|error| LayerError::File { path: path.to_owned(), error })?;
    let mut table: Table = text
        .parse()
        .map_err(|error| LayerError::Syntax { path: path.to_owned(), error: Box::new(error) })?;
    let router = table.remove(ROUTER);
    let table = match router {
        Some(Value::Table(router)) if is_router => router,
        None if is_router => Table::new(),
        Some(Value::Table(_)) | None => table,
        Some(other) => {
            let source = Source::File(path.to_owned());
            return Err(kind(source, ROUTER, "a table", other.type_str()));
        }
    };
    let mut found = Vec::new();
    for (flag, value) in table {
        if flag == CONFIG {
            return Err(LayerError::Nested { path: path.to_owned() });
        }
        let unknown = || LayerError::UnknownKey {
            path: path.to_owned(),
            key: flag.clone(),
            near: near(&flag, known.keys().copied()).map(str::to_owned),
        };
        let arg = known.get(flag.as_str()).ok_or_else(unknown)?;
        let source = Source::File(path.to_owned());
        let values = match (value, arg.get_action()) {
            (Value::Boolean(true), ArgAction::SetTrue) => Vec::new(),
            (Value::Boolean(false), ArgAction::SetTrue) => continue,
            (other, ArgAction::SetTrue) => {
                return Err(kind(source, &flag, "true or false", other.type_str()));
            }
            (Value::Array(all), ArgAction::Append) => {
                let texts = all.iter().map(|value| scalar(value).ok_or(value));
                let texts: Result<Vec<String>, &Value> = texts.collect();
                let wrong = |value: &Value| kind(source.clone(), &flag, "texts", value.type_str());
                texts.map_err(wrong)?
            }
            (value, _) => match scalar(&value) {
                Some(text) => vec![text],
                None => return Err(kind(source, &flag, "one value", value.type_str())),
            },
        };
        if values.is_empty() && matches!(arg.get_action(), ArgAction::Append) {
            continue;
        }
        found.push((flag.clone(), Setting { flag, values, source }));
    }
    Ok(found)
}

/// The variable of a flag.
fn variable(flag: &str) -> String {
    format!("{PREFIX}{}", flag.to_ascii_uppercase().replace('-', "_"))
}

/// The flag that is most like a word, if one is nearly that.
fn near<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.trim_start_matches('-').replace('_', "-");
    let distance = known.map(|flag| (edits(&word, flag), flag)).min()?;
    (distance.0 <= 2).then_some(distance.1)
}

/// Letters to be put in, taken out or changed to come from one word to the other (Levenshtein).
pub(crate) fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (n, letter) in from.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], n + 1);
        for (m, other) in to.iter().enumerate() {
            let changed = before + usize::from(letter != *other);
            before = row[m + 1];
            row[m + 1] = changed.min(before + 1).min(row[m] + 1);
        }
    }
    row[to.len()]
}

/// A value as it would be written on a command line.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(truth) => Some(truth.to_string()),
        Value::Datetime(_) | Value::Array(_) | Value::Table(_) => None,
    }
}

fn kind(origin: Source, flag: &str, wanted: &'static str, found: &str) -> LayerError {
    LayerError::Kind { origin, flag: flag.to_owned(), wanted, found: found.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags with these variables and this file.
    fn layered(args: &str, variables: &[(&str, &str)], file: &str) -> Result<Layered, LayerError> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("dsv4-flags-{}-{n}", std::process::id()));
        std::fs::write(&path, file).expect("write a file");
        let path_text = path.to_str().expect("a path");
        let args = format!("server {args}").replace("FILE", path_text);
        let own = |text: &str| OsString::from(text.replace("FILE", path_text));
        let variables = variables.iter().map(|(name, value)| (own(name), own(value)));
        let layered = parse(args.split_whitespace().map(OsString::from), variables);
        std::fs::remove_file(path).expect("remove the file");
        layered
    }

    fn said(result: Result<Layered, LayerError>) -> String {
        result.expect_err("it is refused").to_string()
    }

    #[test]
    fn a_router_without_workers_says_what_to_give() {
        let text = said(layered("router --port 7", &[], ""));
        for way in [
            "server router --worker http://",
            "server router --discovery etcd://",
            "server router --registry-port ",
        ] {
            assert!(text.contains(way), "{text}");
        }
        for other in ["--ssl-certfile a", "router --worker http://a:1 --ssl-certfile a"] {
            let text = said(layered(other, &[], ""));
            assert!(text.contains("--ssl-keyfile") && !text.contains("a router passes"), "{text}");
        }
        assert!(layered("router --worker http://a:1", &[], "").is_ok());
    }

    #[test]
    fn the_command_line_comes_before_the_environment_and_that_before_the_file() {
        let file =
            "port = 1\nhost = \"file\"\nthreads = 3\ndefault-thinking = true\n[router]\nport = 9\n";
        let variables = [("DSV4_PORT", "2"), ("DSV4_HOST", "variable"), ("DSV4_UCX_LIB", "x")];
        let all = layered("--config FILE --port 3", &variables, file).expect("good flags");
        let serve = &all.cli.serve;
        assert_eq!((serve.port, &*serve.host, serve.threads), (3, "variable", Some(3)));
        assert!(serve.default_thinking);
        let shown: Vec<String> = all.settings.iter().map(ToString::to_string).collect();
        assert!(shown.contains(&"--port 3".to_owned()), "{shown:?}");
        assert!(shown.contains(&"--host variable (DSV4_HOST)".to_owned()), "{shown:?}");
        let thinking =
            shown.iter().find(|text| text.starts_with("--default-thinking")).expect("it");
        assert!(thinking.contains("dsv4-flags-"), "{thinking}");
        assert_eq!(shown.len(), 5, "{shown:?}");
    }

    #[test]
    fn a_list_comes_whole_from_one_place() {
        let file = "disaggregation-bootstrap = [\"a:1\", \"b:2\"]\n";
        let of = |args, variables: &[_]| {
            layered(args, variables, file).expect("good flags").cli.serve.disaggregation_bootstrap
        };
        assert_eq!(of("--config FILE", &[]), ["a:1", "b:2"]);
        assert_eq!(of("", &[("DSV4_CONFIG", "FILE")]), ["a:1", "b:2"]);
        let variable = [("DSV4_DISAGGREGATION_BOOTSTRAP", "c:3, d:4")];
        assert_eq!(of("--config=FILE", &variable), ["c:3", "d:4"]);
        let line = "--disaggregation-bootstrap e:5 --config FILE";
        assert_eq!(of(line, &variable), ["e:5"]);
    }

    #[test]
    fn the_router_has_a_table_of_its_own() {
        let file = "port = 1\nthreads = 3\n[router]\nworker = [\"http://a:1\"]\nport = 4\n";
        let all = layered("router --config FILE", &[], file).expect("good flags");
        let Some(super::super::Command::Router(args)) = all.cli.command else { panic!("a router") };
        assert_eq!((args.port, args.workers), (4, vec!["http://a:1".to_owned()]));
        let bare = layered("router", &[("DSV4_WORKER", "http://b:2,http://c:3")], "");
        let Some(super::super::Command::Router(args)) = bare.expect("good").cli.command else {
            panic!("a router")
        };
        assert_eq!(args.workers, ["http://b:2", "http://c:3"]);
    }

    #[test]
    fn what_is_wrong_is_named_with_where_it_comes_from() {
        let text = said(layered("", &[("DSV4_PORT", "many")], ""));
        assert!(text.contains("--port") && text.contains("comes from DSV4_PORT"), "{text}");
        let text = said(layered("--config FILE", &[], "port = 70000\n"));
        assert!(text.contains("70000") && text.contains("comes from /"), "{text}");
        let text = said(layered("--config FILE", &[], "prot = 1\n"));
        assert!(text.ends_with("prot is not the name of a flag; is it port?"), "{text}");
        let text = said(layered("--config FILE", &[], "max_running_requests = 1\n"));
        assert!(text.ends_with("is it max-running-requests?"), "{text}");
        let text = said(layered("--config FILE", &[], "[routr]\nport = 1\n"));
        assert!(text.ends_with("routr is not the name of a flag"), "{text}");
        let text = said(layered("--config FILE", &[], "port = 1\nport = 2\n"));
        assert!(text.contains("duplicate key"), "{text}");
        let text = said(layered("--config FILE", &[], "default-thinking = 1\n"));
        assert!(text.ends_with("--default-thinking takes true or false, not integer"), "{text}");
        let text = said(layered("--config FILE", &[], "port = [1]\n"));
        assert!(text.ends_with("--port takes one value, not array"), "{text}");
        let text = said(layered("", &[("DSV4_DEFAULT_THINKING", "maybe")], ""));
        assert_eq!(
            text,
            "DSV4_DEFAULT_THINKING: --default-thinking takes true or false, not maybe"
        );
        let text = said(layered("--config /nowhere/at/all", &[], ""));
        assert!(text.starts_with("--config /nowhere/at/all: No such file"), "{text}");
        let text = said(layered("--config FILE", &[], "config = \"x\"\n"));
        assert!(text.ends_with("config cannot stand in a file"), "{text}");
        assert!(layered("--port x", &[], "").is_err() && layered("--nothing", &[], "").is_err());
        assert!(layered("cache ls /tmp", &[("DSV4_PORT", "many")], "").is_ok());
    }

    #[test]
    fn variables_that_are_nearly_flags_are_told() {
        let variables = [
            ("DSV4_MAX_RUNING_REQUESTS", "3"),
            ("DSV4_WORKER", "http://a:1"),
            ("DSV4_UCX_LIB", "x"),
            ("DSV4_TEST_SEED", "1"),
            ("DSV4_NOTHING_OF_OURS", "1"),
            ("DSV5_PORT", "1"),
        ];
        let unknown = layered("", &variables, "").expect("good flags").unknown;
        let slip = "DSV4_MAX_RUNING_REQUESTS; is it DSV4_MAX_RUNNING_REQUESTS?";
        assert_eq!(unknown, [slip, "DSV4_NOTHING_OF_OURS"]);
        assert_eq!((edits("port", "prot"), edits("", "abc"), edits("abc", "abc")), (2, 3, 0));
    }

    #[test]
    fn secrets_are_not_shown() {
        let of = |flag: &str| {
            let values = vec!["hunter2".to_owned()];
            Setting { flag: flag.to_owned(), values, source: Source::CommandLine }.to_string()
        };
        assert_eq!(of("api-key"), "--api-key ...");
        assert_eq!(of("ssl-keyfile"), "--ssl-keyfile ...");
        assert_eq!(of("hf-token"), "--hf-token ...");
        assert_eq!(of("host"), "--host hunter2");
        assert_eq!(of("first-token-timeout"), "--first-token-timeout hunter2");
        let url = |value: &str| {
            let (flag, values) = ("discovery".to_owned(), vec![value.to_owned()]);
            Setting { flag, values, source: Source::CommandLine }.to_string()
        };
        assert_eq!(url("etcd://u:hunter2@h:1/n"), "--discovery etcd://...@h:1/n");
        assert_eq!(url("http://h:1/x?token=hunter2"), "--discovery http://h:1/x");
        let json = r#"{"topic":"a?b@c","endpoint":"tcp://*:1"}"#;
        assert_eq!(url(json), format!("--discovery {json}"));
    }
}
