//! Which trace a request belongs to, as the W3C's Trace Context has it
//! (<https://www.w3.org/TR/trace-context/>): the header `traceparent`, and spans below it.

use std::fmt;
use std::str::FromStr;

/// A header that says nothing usable. Such a request is served without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no traceparent: 00-<32 hex digits>-<16 hex digits>-<2 hex digits> expected")]
pub struct NoTraceParent;

/// The span that a request was sent in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace; not zero.
    pub trace_id: [u8; 16],
    /// The span; not zero.
    pub span_id: [u8; 8],
    /// Whether whoever sent it records the trace.
    pub is_sampled: bool,
}

/// Flag of [`TraceParent::is_sampled`].
const SAMPLED: u8 = 1;

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    // Capitals are no digits in this header.
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_chunks::<2>().0) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

impl FromStr for TraceParent {
    type Err = NoTraceParent;

    fn from_str(text: &str) -> Result<Self, NoTraceParent> {
        let read = || {
            let mut parts = text.splitn(5, '-');
            let [version] = hex::<1>(parts.next()?)?;
            let trace_id = hex(parts.next()?)?;
            let span_id = hex(parts.next()?)?;
            let [flags] = hex::<1>(parts.next()?)?;
            // Versions to come may add parts, this one has none.
            let is_known = version != 0xff && (version != 0 || parts.next().is_none());
            let is_sampled = flags & SAMPLED != 0;
            let is_valid = is_known && trace_id != [0; 16] && span_id != [0; 8];
            is_valid.then_some(Self { trace_id, span_id, is_sampled })
        };
        read().ok_or(NoTraceParent)
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span) = (u128::from_be_bytes(self.trace_id), u64::from_be_bytes(self.span_id));
        write!(f, "00-{trace:032x}-{span:016x}-{:02x}", u8::from(self.is_sampled))
    }
}

/// A span of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The trace, this span and whether it is recorded: what others get as their parent.
    pub context: TraceParent,
    /// The span above it, if that is not this process's own beginning.
    pub parent: Option<[u8; 8]>,
}

impl Span {
    /// A span with the id `span_id` below `parent`.
    #[must_use]
    pub fn below(parent: TraceParent, span_id: [u8; 8]) -> Self {
        Self { context: TraceParent { span_id, ..parent }, parent: Some(parent.span_id) }
    }

    /// The span in which a request came, unchanged: for a process that records nothing, so that what
    /// it asks of others is below that.
    #[must_use]
    pub fn passed_on(parent: TraceParent) -> Self {
        Self { context: parent, parent: None }
    }

    /// Another span with the same parent.
    #[must_use]
    pub fn beside(self, span_id: [u8; 8]) -> Self {
        Self { context: TraceParent { span_id, ..self.context }, ..self }
    }
}

/// A new id for a span; none where there are no random numbers: then there is no span.
#[must_use]
pub fn new_span_id() -> Option<[u8; 8]> {
    let mut id = [0; 8];
    getrandom::fill(&mut id).ok()?;
    // Zero means none.
    (id != [0; 8]).then_some(id)
}

/// How many of the traces that begin here are recorded. Those that others have begun are recorded if
/// they are there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling(f64);

impl Sampling {
    /// A share from 0 to 1.
    #[must_use]
    pub fn of(share: f64) -> Self {
        Self(share.clamp(0.0, 1.0))
    }

    /// Whether a new trace is recorded: by its id, as OpenTelemetry's `TraceIdRatioBased` does.
    #[must_use]
    pub fn takes(self, trace_id: [u8; 16]) -> bool {
        let [.., a, b, c, d, e, f, g, h] = trace_id;
        let number = u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1;
        let limit = (self.0 * (1_u64 << 63) as f64) as u64;
        number < limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_and_written() {
        let parent: TraceParent = EXAMPLE.parse().unwrap();
        assert_eq!(parent.to_string(), EXAMPLE);
        assert_eq!(parent.trace_id[..2], [0x0a, 0xf7]);
        assert_eq!(parent.span_id[7], 0x31);
        assert!(parent.is_sampled);
        let silent: TraceParent = EXAMPLE.replace("-01", "-00").parse().unwrap();
        assert!(!silent.is_sampled);
        // Other flags are not ours, and later versions may be longer.
        let later = format!("{}-more", EXAMPLE.replace("00-", "01-").replace("-01", "-03"));
        assert!(later.parse::<TraceParent>().unwrap().is_sampled);
    }

    #[test]
    fn what_is_no_traceparent_is_refused() {
        let zero_trace = format!("00-{}-b7ad6b7169203331-01", "0".repeat(32));
        let zero_span = format!("00-0af7651916cd43dd8448eb211c80319c-{}-01", "0".repeat(16));
        for bad in [
            "",
            "00",
            &EXAMPLE.to_uppercase(),
            &EXAMPLE[..54],
            &format!("{EXAMPLE}-more"),
            &EXAMPLE.replacen("00", "ff", 1),
            &EXAMPLE.replace('b', "g"),
            &EXAMPLE.replace("0a", "é"),
            &zero_trace,
            &zero_span,
        ] {
            assert_eq!(bad.parse::<TraceParent>(), Err(NoTraceParent), "{bad}");
        }
    }

    #[test]
    fn spans_are_below_what_was_sent() {
        let parent: TraceParent = EXAMPLE.parse().unwrap();
        let span = Span::below(parent, [1; 8]);
        assert_eq!(span.parent, Some(parent.span_id));
        assert_eq!(span.context.trace_id, parent.trace_id);
        assert_eq!(span.context.span_id, [1; 8]);
    }

    #[test]
    fn a_share_of_traces_is_recorded() {
        let taken = |share: f64| {
            let ids = (0..1000_u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
            let ids = ids.map(|low| [[5; 8], low].concat().try_into().unwrap());
            ids.filter(|id| Sampling::of(share).takes(*id)).count()
        };
        assert_eq!((taken(0.0), taken(1.0)), (0, 1000));
        assert!((200..300).contains(&taken(0.25)), "{}", taken(0.25));
    }
}
