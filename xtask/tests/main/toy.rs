//! A workspace of one crate, on which the program runs tests, benches and text rules.

use std::path::{Path, PathBuf};
use std::process::Command;

const FILES: [(&str, &str); 9] = [
    ("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"toy\"]\n"),
    (
        "toy/Cargo.toml",
        "[package]\nname = \"toy\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\
         [[bench]]\nname = \"speed\"\nharness = false\n",
    ),
    (
        "toy/src/lib.rs",
        "//! Toy.\n//! ```\n//! assert_eq!(toy::one(), 1);\n//! ```\n\
         pub fn one() -> u8 {\n    1\n}\n\
         pub mod sim {\n    //! Not a layer, since it is in `src`.\n    \
         #[test]\n    fn inner() {}\n}\n#[test]\nfn outer() {}\n",
    ),
    (
        "toy/tests/main.rs",
        "//! Tests.\nmod golden {\n    #[test]\n    fn a() {}\n    #[test]\n    fn b() {}\n}\n\
         mod http {\n    #[test]\n    fn c() {}\n}\n\
         mod sim {\n    #[test]\n    fn d() {\n        \
         assert_ne!(std::env::var(\"DSV4_TEST_SEED\").as_deref(), Ok(\"13\"));\n    }\n}\n",
    ),
    (
        "toy/benches/speed.rs",
        "//! Bench.\nfn main() {\n    println!(\"figure toy.speed 2.5 GB/s\");\n}\n",
    ),
    ("xtask/tidy-exceptions.toml", ""),
    (".config/test-floor.toml", "[floor]\nunit = 4\ngolden = 3\nsim = 1\nprop = 0\n"),
    ("README.md", "# Toy\n\n[there](toy/Cargo.toml)\n"),
    (".gitignore", "/target\n"),
];

/// The workspace in a folder that goes away with this value.
struct Toy(PathBuf);

impl Toy {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        for (path, text) in FILES {
            let path = root.join(path);
            let folder = path.parent().expect("every file lies in a folder");
            std::fs::create_dir_all(folder).expect("temporary folders can be made");
            write(&path, text);
        }
        Self(root)
    }

    /// Runs the program; gives its success and its output, standard error first.
    fn xtask(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        // An outer nextest must not tell the inner one what to do.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("NEXTEST") {
                command.env_remove(name);
            }
        }
        let output = command
            .args(arguments)
            .env("CARGO_MANIFEST_DIR", self.0.join("xtask"))
            .env("CARGO_TARGET_DIR", self.0.join("target"))
            .env_remove("CI")
            .env_remove("DSV4_TEST_SEED")
            .output()
            .expect("the program starts");
        let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stdout));
        (output.status.success(), text)
    }
}

impl Drop for Toy {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("our own folder can be removed");
    }
}

fn last_line(text: &str) -> &str {
    text.trim_end().lines().next_back().unwrap_or_default()
}

#[test]
fn every_runner_has_the_same_tests_and_the_last_word() {
    let toy = Toy::new("layers");
    let has_nextest = Command::new(env!("CARGO"))
        .args(["nextest", "--version"])
        .output()
        .is_ok_and(|output| output.status.success());
    let runners: &[&[&str]] = if has_nextest { &[&["--plain"], &[]] } else { &[&["--plain"]] };
    for runner in runners {
        let run = |arguments: &[&str]| toy.xtask(&[&["test"], arguments, runner].concat());
        let (ok, text) = run(&["unit"]);
        assert!(ok, "{text}");
        assert!(last_line(&text).contains("3 passed"), "{text}");
        let (ok, text) = run(&["sim", "--seed", "7"]);
        assert!(ok, "{text}");
        assert!(last_line(&text).contains("1 passed"), "{text}");
        let (ok, text) = run(&["sim", "--seed", "13"]);
        assert!(!ok, "the seed did not reach the test: {text}");
        let (ok, text) = run(&["golden"]);
        assert!(!ok && text.contains("2 tests ran"), "under the floor of 3: {text}");
        let (ok, text) = run(&["prop"]);
        assert!(!ok, "an empty layer is an error: {text}");
    }
}

#[test]
fn figures_of_a_bench_end_up_in_a_record() {
    let toy = Toy::new("bench");
    let (ok, text) = toy.xtask(&["bench"]);
    assert!(ok, "{text}");
    assert_eq!(text.matches("figure toy.speed 2.5 GB/s").count(), 2, "{text}");
    let line = text.lines().find_map(|line| line.strip_prefix("record ")).unwrap();
    let record = std::fs::read_to_string(toy.0.join(line)).unwrap();
    assert!(record.contains("\"toy.speed\"") && record.contains("2.5"), "{record}");
    let (ok, text) = toy.xtask(&["bench", "compare", line, line]);
    assert!(ok && text.contains("1.000"), "{text}");
    let (ok, _) = toy.xtask(&["bench", "kernels"]);
    assert!(!ok, "a suite without benches is an error");
}

#[test]
fn a_broken_rule_is_named_with_its_place() {
    let toy = Toy::new("tidy");
    let (ok, text) = toy.xtask(&["tidy"]);
    assert!(ok, "{text}");
    write(&toy.0.join("toy/src/more.rs"), "fn f() {}\n");
    write(&toy.0.join("NOTES.md"), "[gone](gone.md)\n");
    let (ok, text) = toy.xtask(&["tidy"]);
    assert!(!ok);
    assert!(text.contains("toy/src/more.rs:1:") && text.contains("NOTES.md:1:"), "{text}");
    assert!(text.contains("2 findings"), "{text}");
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).expect("temporary files can be written");
}
