//! Flags of `server verify`.

use clap::Args;

/// Flags of `verify`.
#[derive(Clone, Debug, Args)]
pub struct VerifyArgs {
    /// Address of a worker, like http://HOST:PORT.
    #[arg(value_name = "URL")]
    pub url: String,
    /// Share of the pages and objects that are digested again, above 0 and at most 1.
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    pub sample: f64,
    /// Prefixes of which the last part is computed again, in each worker, at most 64.
    #[arg(long, default_value_t = 4, value_name = "COUNT")]
    pub windows: u32,
    /// Which pages a sample takes.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    pub seed: u32,
    /// Key of a worker that wants one.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Print the answer as one JSON object.
    #[arg(long)]
    pub json: bool,
}
