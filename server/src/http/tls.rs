//! TLS on the listening port: a certificate and its key, read at the start and again when asked to.

use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio_rustls::TlsAcceptor;

/// What is offered to clients, what is liked best first.
const PROTOCOLS: [&[u8]; 2] = [HTTP_2, b"http/1.1"];
/// HTTP/2's name in the handshake.
pub(super) const HTTP_2: &[u8] = b"h2";

/// Certificates that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A file that cannot be read.
    #[error("--{flag} {path}: {reason}")]
    Unreadable {
        /// The flag that names it.
        flag: &'static str,
        /// Its path.
        path: String,
        /// The operating system's or the reader's answer.
        reason: String,
    },
    /// A file without certificates.
    #[error("--ssl-certfile {0}: there is no certificate in it (PEM expected)")]
    NoCertificate(String),
    /// A file without a key.
    #[error("--ssl-keyfile {0}: there is no private key in it (PEM, without a password, expected)")]
    NoKey(String),
    /// The key is that of another certificate.
    #[error("--ssl-keyfile {key} is not the key of the certificate in --ssl-certfile {cert}")]
    Mismatch {
        /// Path of the certificate.
        cert: String,
        /// Path of the key.
        key: String,
    },
    /// A certificate or a key of a kind that is not known.
    #[error("--ssl-certfile {cert}, --ssl-keyfile {key}: {reason}")]
    Unusable {
        /// Path of the certificate.
        cert: String,
        /// Path of the key.
        key: String,
        /// What rustls says.
        reason: String,
    },
}

/// A certificate in use, and where it comes from.
#[derive(Debug)]
pub struct Tls {
    cert: PathBuf,
    key: PathBuf,
    current: Mutex<Arc<ServerConfig>>,
}

impl Tls {
    /// Reads a certificate chain and its key, both PEM.
    ///
    /// # Errors
    /// [`TlsError`], which names the file.
    pub fn open(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let current = Mutex::new(Arc::new(read(cert, key)?));
        Ok(Self { cert: cert.to_owned(), key: key.to_owned(), current })
    }

    /// Reads both files again. New connections get what they say now; if they cannot be used,
    /// everything stays as it was.
    ///
    /// # Errors
    /// [`TlsError`], which names the file.
    pub fn reload(&self) -> Result<(), TlsError> {
        let config = Arc::new(read(&self.cert, &self.key)?);
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// For the next handshake.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        TlsAcceptor::from(Arc::clone(&current))
    }
}

fn read(cert: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let (cert_shown, key_shown) = (cert.display().to_string(), key.display().to_string());
    let unreadable = |flag, path: &str, error: &pem::Error| TlsError::Unreadable {
        flag,
        path: path.to_owned(),
        reason: match error {
            pem::Error::Io(error) => error.to_string(),
            // Without what stands there, which may be a key.
            _ => "it is no valid PEM".to_owned(),
        },
    };
    let wrong_cert = |error: pem::Error| unreadable("ssl-certfile", &cert_shown, &error);
    let chain = CertificateDer::pem_file_iter(cert).map_err(wrong_cert)?;
    let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(wrong_cert)?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate(cert_shown));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| match error {
        pem::Error::NoItemsFound => TlsError::NoKey(key_shown.clone()),
        other => unreadable("ssl-keyfile", &key_shown, &other),
    })?;
    let (cert, key) = (cert_shown, key_shown);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let made = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private));
    let mut config = made.map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => TlsError::Mismatch { cert, key },
        other => TlsError::Unusable { cert, key, reason: other.to_string() },
    })?;
    config.alpn_protocols = PROTOCOLS.iter().map(|name| name.to_vec()).collect();
    Ok(config)
}
