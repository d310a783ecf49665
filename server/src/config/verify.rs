//! Flags of `server verify`.

use clap::Args;

/// A share of what is there.
fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "a number above 0 and at most 1 expected".to_owned())
}

/// Flags of `verify`.
#[derive(Clone, Debug, Args)]
pub struct VerifyArgs {
    /// Address of a worker, like http://HOST:PORT.
    #[arg(value_name = "URL")]
    pub url: String,
    /// Share of the pages and objects that are digested again, above 0 and at most 1.
    #[arg(
        long,
        default_value_t = 1.0,
        value_name = "SHARE",
        value_parser = share,
        allow_negative_numbers = true
    )]
    pub sample: f64,
    /// Prefixes of which the last part is computed again, in each worker, at most 64.
    #[arg(
        long,
        default_value_t = 4,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(0..=64),
        allow_negative_numbers = true
    )]
    pub windows: u32,
    /// Which pages a sample takes.
    #[arg(long, default_value_t = 0, value_name = "NUMBER", allow_negative_numbers = true)]
    pub seed: u64,
    /// Longest wait for the worker's answer, in seconds.
    #[arg(
        long,
        default_value_t = 900,
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u32).range(1..),
        allow_negative_numbers = true
    )]
    pub timeout: u32,
    /// Key of a worker that wants one.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Print the answer as one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use crate::config::Cli;
    use clap::Parser as _;

    #[test]
    fn what_an_audit_cannot_have_is_refused_with_what_it_can() {
        let line = |flag: &str, value: &str| {
            Cli::try_parse_from(["server", "verify", "http://h:1", flag, value])
        };
        for (flag, value, wanted) in [
            ("--sample", "nan", "above 0 and at most 1"),
            ("--sample", "inf", "above 0 and at most 1"),
            ("--sample", "-1", "above 0 and at most 1"),
            ("--sample", "0", "above 0 and at most 1"),
            ("--windows", "65", "0..=64"),
            ("--windows", "-1", "0..=64"),
            ("--seed", "-1", "--seed"),
        ] {
            let error = line(flag, value).expect_err(value).to_string();
            assert!(error.contains(wanted), "{flag} {value}: {error}");
            assert!(!error.contains("unexpected argument"), "{flag} {value}: {error}");
        }
        for (flag, value) in
            [("--sample", "0.5"), ("--windows", "0"), ("--seed", "18446744073709551615")]
        {
            assert!(line(flag, value).is_ok(), "{flag} {value}");
        }
    }
}
