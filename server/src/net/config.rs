//! Where an object store is, and with which credentials it is asked.

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key};
use std::fmt;
use std::str::FromStr;

/// A bucket and a prefix in it, written `s3://BUCKET/PREFIX`. It has no place for a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectUrl {
    bucket: String,
    /// Parts of the prefix, none of them empty.
    prefix: Vec<String>,
}

/// Not the address of a bucket. The text is not repeated: it may have a password in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("s3://BUCKET or s3://BUCKET/PREFIX expected: {0}")]
pub struct BadObjectUrl(&'static str);

impl ObjectUrl {
    /// Parts of the prefix.
    pub(super) fn prefix(&self) -> &[String] {
        &self.prefix
    }
}

impl FromStr for ObjectUrl {
    type Err = BadObjectUrl;

    fn from_str(text: &str) -> Result<Self, BadObjectUrl> {
        let rest = text.strip_prefix("s3://").ok_or(BadObjectUrl("another scheme"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let of_bucket = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(of_bucket) {
            return Err(BadObjectUrl("a bucket has 3 to 63 characters of a-z, 0-9, - and ."));
        }
        let parts = prefix.split('/').filter(|part| !part.is_empty());
        let prefix: Vec<String> = parts.map(str::to_owned).collect();
        let of_prefix = |c: char| c.is_ascii_alphanumeric() || "-_.=".contains(c);
        let is_good = |part: &String| part.chars().all(of_prefix) && *part != "." && *part != "..";
        if !prefix.iter().all(is_good) || prefix.iter().map(String::len).sum::<usize>() > 512 {
            return Err(BadObjectUrl("a prefix has a-z, A-Z, 0-9, -, _, =, . and / between"));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        self.prefix.iter().try_for_each(|part| write!(f, "/{part}"))
    }
}

/// A client for a bucket with what the standard variables (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT` and
/// so on) say, and the secrets among them, which are to be in no message. `instead` has variables
/// that count instead of those of the environment; a name that is not known is left out, as there.
pub(super) fn from_environment(
    url: &ObjectUrl,
    instead: &[(&str, &str)],
) -> (AmazonS3Builder, Vec<String>) {
    let mut builder = AmazonS3Builder::from_env();
    for (name, value) in instead {
        if let Ok(key) = name.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, *value);
        }
    }
    builder = builder.with_bucket_name(&url.bucket);
    let endpoint = builder.get_config_value(&Key::Endpoint);
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        // Whoever writes http means it.
        builder = builder.with_allow_http(true);
    }
    let secrets = [Key::AccessKeyId, Key::SecretAccessKey, Key::Token];
    let secrets = secrets.iter().filter_map(|key| builder.get_config_value(key));
    let secrets = secrets.filter(|secret| !secret.is_empty()).collect();
    (builder, secrets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_and_prefix_are_read_and_nothing_else_is_taken() {
        for (text, says) in [
            ("s3://cache", "s3://cache"),
            ("s3://cache/", "s3://cache"),
            ("s3://my.cache-1/a//b_c=1/", "s3://my.cache-1/a/b_c=1"),
        ] {
            assert_eq!(text.parse::<ObjectUrl>().unwrap().to_string(), says);
        }
        for bad in [
            "",
            "cache",
            "gs://cache",
            "s3://",
            "s3://ab",
            "s3://Cache/x",
            "s3://user:secret@cache/x",
            "s3://cache/../x",
            "s3://cache/a?b",
            "s3://cache/ä",
        ] {
            let error = bad.parse::<ObjectUrl>().unwrap_err().to_string();
            assert!(error.contains("s3://BUCKET") && !error.contains("secret"), "{bad}: {error}");
        }
    }
}
