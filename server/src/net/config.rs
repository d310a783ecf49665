//! Where an object store is, and with which credentials it is asked.

use super::bounded::BoundedConnector;
use axum::http::Uri;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as S3Key};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{ClientConfigKey, ClientOptions, Error, ObjectStore, RetryConfig};
use std::fmt;
use std::str::FromStr;

/// Whose interface a store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Provider {
    S3,
    Google,
    Azure,
}

impl Provider {
    const ALL: [Self; 3] = [Self::S3, Self::Google, Self::Azure];

    const fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3://",
            Self::Google => "gs://",
            Self::Azure => "az://",
        }
    }

    /// Beginning of the variables that configure a client.
    const fn variables(self) -> &'static str {
        match self {
            Self::S3 => "AWS_",
            Self::Google => "GOOGLE_",
            Self::Azure => "AZURE_",
        }
    }
}

/// A bucket and a prefix in it, written `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or
/// `az://CONTAINER/PREFIX`. It has no place for a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectUrl {
    provider: Provider,
    bucket: String,
    /// Parts of the prefix, none of them empty.
    prefix: Vec<String>,
}

/// Not the address of a bucket. The text is not repeated: it may have a password in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX expected: {0}")]
pub struct BadObjectUrl(&'static str);

impl ObjectUrl {
    /// Parts of the prefix.
    pub(super) fn prefix(&self) -> &[String] {
        &self.prefix
    }

    /// Beginning of the variables that configure a client.
    pub(super) const fn variables(&self) -> &'static str {
        self.provider.variables()
    }
}

impl FromStr for ObjectUrl {
    type Err = BadObjectUrl;

    fn from_str(text: &str) -> Result<Self, BadObjectUrl> {
        let provider = Provider::ALL.into_iter().find(|one| text.starts_with(one.scheme()));
        let provider = provider.ok_or(BadObjectUrl("another scheme"))?;
        let rest = &text[provider.scheme().len()..];
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let of_bucket = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._".contains(c);
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(of_bucket) {
            return Err(BadObjectUrl("a bucket has 3 to 63 characters of a-z, 0-9, -, . and _"));
        }
        let parts = prefix.split('/').filter(|part| !part.is_empty());
        let prefix: Vec<String> = parts.map(str::to_owned).collect();
        let of_prefix = |c: char| c.is_ascii_alphanumeric() || "-_.=".contains(c);
        let is_good = |part: &String| part.chars().all(of_prefix) && *part != "." && *part != "..";
        if !prefix.iter().all(is_good) || prefix.iter().map(String::len).sum::<usize>() > 512 {
            return Err(BadObjectUrl("a prefix has a-z, A-Z, 0-9, -, _, =, . and / between"));
        }
        Ok(Self { provider, bucket: bucket.to_owned(), prefix })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.provider.scheme(), self.bucket)?;
        self.prefix.iter().try_for_each(|part| write!(f, "/{part}"))
    }
}

/// How requests are made, whoever answers them.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    /// Limits of a connection.
    pub(super) options: ClientOptions,
    /// What is tried again.
    pub(super) retry: RetryConfig,
}

/// A client, or why there is none; the secrets of its configuration, which are to be in no message;
/// and whether there were any.
pub(super) type Made = (Result<Box<dyn ObjectStore>, Error>, Vec<String>, bool);

/// Whether an endpoint says http: whoever writes that means it.
///
/// # Errors
///
/// For what is no address of a server; the crate would panic when it is used first.
fn allows_http(endpoint: Option<String>) -> Result<bool, Error> {
    let Some(endpoint) = endpoint else { return Ok(false) };
    let found = endpoint.parse::<Uri>().ok();
    let scheme = found.as_ref().filter(|uri| uri.host().is_some()).and_then(Uri::scheme_str);
    match scheme {
        Some("http") => Ok(true),
        Some("https") => Ok(false),
        _ => Err(Error::Generic {
            store: "object store",
            source: "the endpoint is not like http://HOST:PORT or https://HOST".into(),
        }),
    }
}

/// What stands before the `@` of an endpoint, and the password in it.
fn login_of(endpoint: Option<String>) -> Vec<String> {
    let endpoint = endpoint.unwrap_or_default();
    let rest = endpoint.split_once("://").map_or(&*endpoint, |(_, rest)| rest);
    let Some((login, _)) = rest.rsplit_once('@') else { return Vec::new() };
    let password = login.split_once(':').map(|(_, password)| password.to_owned());
    password.into_iter().chain([login.to_owned()]).collect()
}

/// Makes a client of one provider: its builder's configuration from the environment, then from
/// `instead`, the bucket, and what depends on them.
macro_rules! make {
    ($Builder:ty, $bucket:ident, $url:expr, $instead:expr, $manner:expr, $endpoint:expr,
     $allow:expr, $secrets:expr, $more:expr) => {{
        let mut builder = <$Builder>::from_env();
        for (name, value) in $instead {
            if let Ok(key) = name.to_ascii_lowercase().parse() {
                builder = builder.with_config(key, *value);
            }
        }
        builder = builder.$bucket(&$url.bucket);
        let given: Vec<String> =
            $secrets.iter().filter_map(|key| builder.get_config_value(key)).collect();
        let has_credentials = !given.is_empty();
        let secrets: Vec<String> = given
            .into_iter()
            .chain(login_of(builder.get_config_value(&$endpoint)))
            // What is shorter is no secret, and would hide parts of words.
            .filter(|secret| secret.len() >= 4)
            .collect();
        let is_allowed = builder.get_config_value(&$allow).is_some_and(|text| text == "true");
        let Manner { options, retry } = $manner;
        let made = allows_http(builder.get_config_value(&$endpoint)).and_then(|says_http| {
            let options = options.with_allow_http(is_allowed || says_http);
            let builder = builder.with_client_options(options).with_retry(retry);
            $more(builder.with_http_connector(BoundedConnector)).build()
        });
        (made.map(|client| Box::new(client) as Box<dyn ObjectStore>), secrets, has_credentials)
    }};
}

/// Makes a client for a bucket with what the provider's usual variables say (`AWS_`, `GOOGLE_`,
/// `AZURE_`). `instead` has variables that count instead of those of the environment; a name that is
/// not known is left out, as there.
pub(super) fn client(url: &ObjectUrl, instead: &[(&str, &str)], manner: Manner) -> Made {
    match url.provider {
        Provider::S3 => make!(
            AmazonS3Builder,
            with_bucket_name,
            url,
            instead,
            manner,
            S3Key::Endpoint,
            S3Key::Client(ClientConfigKey::AllowHttp),
            [S3Key::AccessKeyId, S3Key::SecretAccessKey, S3Key::Token],
            // Not all servers have it, and we remove one at a time.
            |builder: AmazonS3Builder| builder.with_disable_bulk_delete(true)
        ),
        Provider::Google => make!(
            GoogleCloudStorageBuilder,
            with_bucket_name,
            url,
            instead,
            manner,
            GoogleConfigKey::BaseUrl,
            GoogleConfigKey::Client(ClientConfigKey::AllowHttp),
            [GoogleConfigKey::ServiceAccountKey],
            |builder| builder
        ),
        Provider::Azure => make!(
            MicrosoftAzureBuilder,
            with_container_name,
            url,
            instead,
            manner,
            AzureConfigKey::Endpoint,
            AzureConfigKey::Client(ClientConfigKey::AllowHttp),
            [
                AzureConfigKey::AccessKey,
                AzureConfigKey::ClientSecret,
                AzureConfigKey::SasKey,
                AzureConfigKey::Token
            ],
            |builder| builder
        ),
    }
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
            ("gs://my_cache/a", "gs://my_cache/a"),
            ("az://cache/a/b", "az://cache/a/b"),
        ] {
            assert_eq!(text.parse::<ObjectUrl>().unwrap().to_string(), says);
        }
        for bad in [
            "",
            "cache",
            "gcs://cache",
            "gs:/cache",
            "az://",
            "s3://",
            "s3://ab",
            "s3://Cache/x",
            "s3://user:secret@cache/x",
            "s3://cache/../x",
            "s3://cache/a?b",
            "s3://cache/ä",
        ] {
            let error = bad.parse::<ObjectUrl>().unwrap_err().to_string();
            assert!(
                error.contains("s3://BUCKET/PREFIX") && !error.contains("secret"),
                "{bad}: {error}"
            );
        }
    }

    #[test]
    fn clients_come_of_the_variables_of_their_provider_and_secrets_are_known() {
        crate::net::choose_cryptography();
        let manner = || Manner { options: ClientOptions::new(), retry: RetryConfig::default() };
        let key = r#"{"private_key":"hunter2","private_key_id":"a","client_email":"b","disable_oauth":true}"#;
        for (url, variables, secret) in [
            (
                "s3://cache",
                &[("AWS_ACCESS_KEY_ID", "who"), ("AWS_SECRET_ACCESS_KEY", "hunter2")][..],
                "hunter2",
            ),
            ("gs://cache", &[("GOOGLE_SERVICE_ACCOUNT_KEY", key)], key),
            (
                "az://cache",
                &[
                    ("AZURE_STORAGE_ACCOUNT_NAME", "who"),
                    ("AZURE_STORAGE_ACCOUNT_KEY", "aHVudGVyMg=="),
                ],
                "aHVudGVyMg==",
            ),
        ] {
            let parsed = url.parse().unwrap();
            let (made, secrets, _) = client(&parsed, variables, manner());
            assert!(made.is_ok(), "{url}: {made:?}");
            assert!(secrets.iter().any(|other| other == secret), "{url}: {secrets:?}");
            assert!(variables.iter().all(|(name, _)| name.starts_with(parsed.variables())));
        }
        for endpoint in ["", "127.0.0.1:9000", "http://", "ftp://host", "not an address"] {
            let variables = [("AWS_ENDPOINT", endpoint), ("AWS_ACCESS_KEY_ID", "who")];
            let (made, _, _) = client(&"s3://cache".parse().unwrap(), &variables, manner());
            assert!(made.unwrap_err().to_string().contains("http://HOST:PORT"), "{endpoint}");
        }
        let variables = [("AWS_ENDPOINT", "http://user:pa55w0rd@host:9000/x")];
        let (made, secrets, _) = client(&"s3://cache".parse().unwrap(), &variables, manner());
        assert!(made.is_ok() && secrets.contains(&"pa55w0rd".to_owned()), "{secrets:?}");
        // An account is needed, and nothing can stand for it.
        let (made, _, _) = client(&"az://cache".parse().unwrap(), &[], manner());
        assert!(made.unwrap_err().to_string().contains("Account"));
    }
}
