//! Flags of the edge, the same for workers and the router: TLS and the size of bodies.

use super::layers::Setting;
use super::{Mode, ServeArgs};
use crate::http::tls::{Tls, TlsError};
use crate::http::{About, Edge};
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Flags about what comes in over HTTP.
#[derive(Clone, Debug, Args)]
pub struct EdgeArgs {
    /// File (PEM) with the certificate chain for HTTPS, its own first; read again on SIGHUP
    /// [default: plain HTTP].
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile")]
    pub ssl_certfile: Option<PathBuf>,
    /// File (PEM) with the certificate's private key.
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub ssl_keyfile: Option<PathBuf>,
    /// Largest request body, MiB; a larger one gets 413.
    #[arg(long, default_value_t = 32, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_body_mib: u32,
    /// Longest time for which a client may take nothing of an answer that waits for it, seconds; then the
    /// answer is given up and its request ends. 0 for no limit.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub send_timeout: u64,
}

impl EdgeArgs {
    /// Certificate and key, if there is to be TLS.
    ///
    /// # Errors
    /// [`TlsError`], which names the file.
    pub fn tls(&self) -> Result<Option<Tls>, TlsError> {
        match (&self.ssl_certfile, &self.ssl_keyfile) {
            (Some(cert), Some(key)) => Tls::open(cert, key).map(Some),
            _ => Ok(None),
        }
    }

    /// How connections are treated.
    ///
    /// # Errors
    /// [`TlsError`], which names the file.
    pub fn edge(&self) -> Result<Edge, TlsError> {
        let send_timeout = (self.send_timeout > 0).then(|| Duration::from_secs(self.send_timeout));
        let tls = self.tls()?.map(Arc::new);
        Ok(Edge { tls, send_timeout, ..Edge::default() })
    }

    /// Largest request body, bytes.
    #[must_use]
    pub const fn max_body_bytes(&self) -> usize {
        (self.max_body_mib as usize) << 20
    }
}

impl ServeArgs {
    /// What the process says about itself at `/server_info`.
    #[must_use]
    pub fn about(&self, settings: &[Setting]) -> About {
        let limit = |name, most: u64| (name, Some(most));
        About {
            model_path: crate::node::model_path(self).display().to_string(),
            limits: vec![
                limit("chunked_prefill_size", self.chunked_prefill_size.into()),
                limit("max_running_requests", self.max_running_requests.into()),
                limit("max_queued_requests", self.max_queued_requests.into()),
                ("max_queued_tokens", self.max_queued_tokens),
                limit("num_reserved_decode_tokens", self.num_reserved_decode_tokens.into()),
                ("queue_timeout_s", (self.queue_timeout > 0).then_some(self.queue_timeout)),
                ("first_token_timeout_s", self.first_token_timeout),
                (
                    "watchdog_timeout_s",
                    (self.watchdog_timeout > 0).then_some(self.watchdog_timeout),
                ),
                limit("drain_timeout_s", self.drain_timeout),
            ],
            flags: settings.to_vec(),
        }
    }

    /// Whether a router that finds this worker could not speak to it: routers speak plain HTTP.
    pub(super) fn is_found_behind_tls(&self) -> bool {
        let takes_requests = self.disaggregation_mode != Mode::Prefill;
        self.discovery.is_some() && takes_requests && self.edge.ssl_certfile.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::*;
    use clap::Parser as _;

    fn parse(flags: &str) -> Result<Cli, String> {
        let args = std::iter::once("server").chain(flags.split_whitespace());
        Cli::try_parse_from(args).map_err(|error| error.to_string())
    }

    #[test]
    fn certificate_and_key_come_together() {
        assert!(parse("--ssl-certfile a --ssl-keyfile b").is_ok());
        for program in ["", "router --worker http://a:1 "] {
            for (one, other) in [("certfile", "keyfile"), ("keyfile", "certfile")] {
                let error = parse(&format!("{program}--ssl-{one} a")).unwrap_err();
                assert!(error.contains(&format!("--ssl-{other}")), "{error}");
            }
        }
    }

    #[test]
    fn a_worker_with_tls_is_not_announced_to_routers() {
        let check = |flags: &str| {
            let cli = parse(&format!("--ssl-certfile a --ssl-keyfile b {flags}")).unwrap();
            cli.serve.validate().map_err(|error| error.to_string())
        };
        assert_eq!(check(""), Ok(()));
        assert_eq!(check("--discovery http://a:1 --disaggregation-mode prefill"), Ok(()));
        let error = check("--discovery http://a:1").unwrap_err();
        assert!(error.contains("--ssl-certfile") && error.contains("plain HTTP"), "{error}");
    }

    #[test]
    fn what_a_process_says_of_itself_has_no_secrets() {
        let of = |flag: &str, value: &str| Setting {
            flag: flag.to_owned(),
            values: vec![value.to_owned()],
            source: super::super::layers::Source::CommandLine,
        };
        let cli = parse("--api-key hunter2 --max-queued-requests 7 --queue-timeout 0").unwrap();
        let settings = [of("api-key", "hunter2"), of("max-queued-requests", "7")];
        let about = cli.serve.about(&settings);
        let flags = about.flags_json();
        assert_eq!(flags["max-queued-requests"]["values"][0], "7");
        assert!(!flags.to_string().contains("hunter2"), "{flags}");
        let limits = about.limits_json();
        assert_eq!(limits["max_queued_requests"], 7);
        assert!(limits["queue_timeout_s"].is_null() && limits["watchdog_timeout_s"] == 300);
    }

    #[test]
    fn bodies_are_bounded_by_mebibytes() {
        let edge = |flags: &str| parse(flags).unwrap().serve.edge;
        assert_eq!(edge("").max_body_bytes(), crate::http::MAX_BODY_BYTES);
        assert_eq!(edge("--max-body-mib 1").max_body_bytes(), 1 << 20);
        assert!(parse("--max-body-mib 0").is_err());
    }

    #[test]
    fn clients_that_take_nothing_are_left_after_a_limit_or_never() {
        let limit = |flags: &str| parse(flags).unwrap().serve.edge.edge().unwrap().send_timeout;
        assert_eq!(limit(""), Edge::default().send_timeout);
        assert_eq!(limit("--send-timeout 5"), Some(Duration::from_secs(5)));
        assert_eq!(limit("--send-timeout 0"), None);
    }
}
