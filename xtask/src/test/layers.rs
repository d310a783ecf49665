//! Which test belongs to which layer, and how a runner is told.
//!
//! A test in `tests/` belongs to the layer that its module is named after: `golden::..` to the
//! golden layer. Every other integration test, and every test in `src/`, is a unit test.

use crate::sh;
use anyhow::{Context as _, Result};
use std::fmt;
use std::process::Command;

/// Most tests that the floor forgives where the Python client is missing.
pub(super) const PYTHON_TESTS_MAX: u64 = 4;

/// A layer of tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Layer {
    /// Tests in `src/`, doc tests, and integration tests of no other layer.
    Unit,
    /// Random operations against a naive oracle.
    Prop,
    /// State tables against committed dumps.
    States,
    /// Numbers and bytes against committed vectors.
    Golden,
    /// One suite for every implementation of a trait.
    Conformance,
    /// Every order of events at the hand-off's machines, each guard removed, the known races.
    Model,
    /// Seeded runs of many nodes under faults, in virtual time.
    Sim,
    /// Real processes over real HTTP.
    E2e,
    /// The lock-free parts under the model checker loom; not part of `all`, a step of its own in CI.
    Loom,
    /// The long load run; not part of `all`.
    Load,
    /// The long run under faults; not part of `all`.
    Faults,
    /// Everything but loom and the long runs.
    All,
}

impl Layer {
    /// Modules in `tests/` that make up the layer.
    fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Prop => &["prop", "props", "properties", "pools", "plans", "digests"],
            Self::States => &["states"],
            Self::Golden => &["golden", "official", "invariance", "vectors", "frozen"],
            Self::Conformance => &["conformance"],
            Self::Model => &["model", "races"],
            Self::Sim => &["sim", "faults"],
            Self::E2e => &["e2e", "pd_pair", "processes"],
            Self::Unit | Self::Loom | Self::Load | Self::Faults | Self::All => &[],
        }
    }

    /// True if the layer has tests that start processes and may use the Python client.
    pub(super) fn has_end_to_end(self) -> bool {
        matches!(self, Self::E2e | Self::All)
    }

    /// True if the layer has tests of the remote store.
    pub(super) fn has_object_server(self) -> bool {
        matches!(self, Self::Conformance | Self::E2e | Self::All)
    }

    /// True if the layer has tests of discovery by etcd.
    pub(super) fn has_etcd(self) -> bool {
        matches!(self, Self::E2e | Self::All)
    }

    /// True if the layer has tests of the page in a browser.
    pub(super) fn has_browser(self) -> bool {
        matches!(self, Self::E2e | Self::All)
    }

    /// True if doc tests belong to the layer.
    pub(super) fn has_doc_tests(self) -> bool {
        matches!(self, Self::Unit | Self::All)
    }

    fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self)
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// Modules of every layer but unit.
fn claimed() -> impl Iterator<Item = &'static str> {
    use clap::ValueEnum as _;
    Layer::value_variants().iter().flat_map(|layer| layer.modules()).copied()
}

/// The nextest expression for `layer` without the tests named `without`; `None` for all tests.
pub(super) fn nextest_filter(layer: Layer, without: Option<&str>) -> Option<String> {
    let modules =
        |modules: Vec<&str>| format!("(kind(test) & test(/(^|::)({})::/))", modules.join("|"));
    let mut filter = match layer {
        Layer::All | Layer::Loom | Layer::Load | Layer::Faults => None,
        Layer::Unit => Some(format!("not {}", modules(claimed().collect()))),
        _ => Some(modules(layer.modules().to_vec())),
    };
    if let Some(name) = without {
        let not = format!("not test({name})");
        filter = Some(filter.map_or(not.clone(), |filter| format!("({filter}) & {not}")));
    }
    filter
}

/// The `cargo test` runs that have the same tests as [`nextest_filter`] names.
pub(super) fn libtest(layer: Layer, without: Option<&str>) -> Vec<Command> {
    let command = |targets: &[&str]| {
        let mut command = sh::cargo();
        command.args(["test", "--workspace", "--all-features", "--no-fail-fast"]);
        command.args(targets).arg("--");
        if let Some(name) = without {
            command.args(["--skip", name]);
        }
        command
    };
    // libtest knows only substrings; with `::` they are as good as the module names, since no
    // deeper module is called like a layer.
    let modules = |names: &[&str]| names.iter().map(|name| format!("{name}::")).collect::<Vec<_>>();
    match layer {
        Layer::All | Layer::Loom | Layer::Load | Layer::Faults => vec![command(&["--tests"])],
        Layer::Unit => {
            let mut integration = command(&["--test", "*"]);
            for module in modules(&claimed().collect::<Vec<_>>()) {
                integration.args(["--skip", &module]);
            }
            vec![command(&["--lib", "--bins"]), integration]
        }
        _ => {
            let mut integration = command(&["--test", "*"]);
            integration.args(modules(layer.modules()));
            vec![integration]
        }
    }
}

/// The committed floor of `layer`.
pub(super) fn floor(text: &str, layer: Layer) -> Result<u64> {
    let table: toml::Table = text.parse().context("parse")?;
    let floor = table.get("floor").and_then(|floor| floor.get(layer.name()));
    let floor = floor.and_then(toml::Value::as_integer).and_then(|floor| u64::try_from(floor).ok());
    floor.with_context(|| format!("[floor] has no number for {layer}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn no_module_belongs_to_two_layers() {
        let mut all: Vec<_> = claimed().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn every_layer_of_the_workspace_has_a_floor() {
        let text = std::fs::read_to_string(sh::root().join(".config/test-floor.toml")).unwrap();
        let mut sum = 0;
        for layer in Layer::value_variants() {
            match layer {
                Layer::Loom | Layer::Load | Layer::Faults => {}
                Layer::All => assert!(floor(&text, *layer).unwrap() >= sum, "all is the sum"),
                _ => sum += floor(&text, *layer).unwrap(),
            }
        }
        assert!(floor("[floor]\n", Layer::Unit).is_err());
    }

    #[test]
    fn filters_name_the_modules() {
        let filter = nextest_filter(Layer::Sim, None).unwrap();
        assert_eq!(filter, "(kind(test) & test(/(^|::)(sim|faults)::/))");
        assert_eq!(nextest_filter(Layer::All, None), None);
        let filter = nextest_filter(Layer::E2e, Some("x")).unwrap();
        assert!(filter.ends_with(") & not test(x)"), "{filter}");
        assert!(nextest_filter(Layer::Unit, None).unwrap().starts_with("not (kind(test)"));
    }

    #[test]
    fn both_runners_are_told_the_same_modules() {
        let arguments = |layer| -> Vec<String> {
            let commands = libtest(layer, Some("openai"));
            let all = commands.iter().flat_map(|command| command.get_args());
            all.map(|argument| argument.to_string_lossy().into_owned()).collect()
        };
        assert!(arguments(Layer::Golden).contains(&"official::".to_owned()));
        assert!(!arguments(Layer::Golden).contains(&"sim::".to_owned()));
        let unit = arguments(Layer::Unit);
        for module in claimed() {
            let at = unit.iter().position(|argument| *argument == format!("{module}::")).unwrap();
            assert_eq!(unit[at - 1], "--skip");
        }
        assert_eq!(arguments(Layer::All).last().unwrap(), "openai");
    }
}
