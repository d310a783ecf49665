//! Several answers to one prompt.

use super::error::ApiError;
use super::fields::Fields;
use crate::engine::{GenerateRequest, Usage};
use crate::trace::new_span_id;
use std::future::poll_fn;
use std::task::{Context, Poll};

/// Most answers to one prompt, as in OpenAI's API.
const MAX_CHOICES: u32 = 128;

/// Reads `n`, and `best_of`, which can only be the same or 1: nobody ranks answers here.
pub(super) fn read(fields: &Fields) -> Result<u32, ApiError> {
    let n = fields.count("n", 1, MAX_CHOICES)?.unwrap_or(1);
    match fields.integer("best_of")? {
        Some(best) if best != i64::from(n) && best != 1 => {
            let message = format!(
                "best_of is {best}, and answers are not ranked here: it can be left out, or be n"
            );
            Err(ApiError::invalid("best_of", message))
        }
        _ => Ok(n),
    }
}

/// The request for one of several answers: its own name and, as in vLLM, the seed that follows.
pub(super) fn request(first: &GenerateRequest, choice: u32) -> GenerateRequest {
    let mut request = first.clone();
    if choice > 0 {
        request.id = format!("{}-{choice}", first.id);
        request.sampling.seed = first.sampling.seed.wrapping_add(choice.into());
        let span = first.provenance.span;
        request.provenance.span = span.and_then(|span| Some(span.beside(new_span_id()?)));
    }
    request
}

/// Counts of all answers: the prompt once, as the first answer found it.
pub(super) fn total(usages: impl IntoIterator<Item = Usage>) -> Usage {
    let all = usages.into_iter().reduce(|sum, usage| Usage {
        completion_tokens: sum.completion_tokens.saturating_add(usage.completion_tokens),
        ..sum
    });
    all.unwrap_or_default()
}

/// One answer on its way.
pub(super) trait Part {
    type Item;
    /// Its next piece; `None` after the last one.
    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Option<Self::Item>>;
}

/// Pieces of several answers, as they come.
pub(super) struct Merged<T> {
    pub(super) parts: Vec<T>,
    ended: Vec<bool>,
    /// Which is looked at first, so that none waits for the others.
    turn: usize,
}

impl<T: Part> Merged<T> {
    pub(super) fn new(parts: Vec<T>) -> Self {
        let ended = vec![false; parts.len()];
        Self { parts, ended, turn: 0 }
    }

    /// Gives up what has not ended: one answer is lost, so nobody waits for the others, which must not
    /// keep their places.
    pub(super) fn abandon(&mut self) {
        self.parts.clear();
        self.ended.clear();
    }

    /// The next piece and whose it is; `None` when all have ended. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<(usize, T::Item)> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, T::Item)>> {
        let count = self.parts.len();
        for at in (0..count).map(|n| (self.turn + n) % count) {
            if self.ended[at] {
                continue;
            }
            match self.parts[at].poll_item(cx) {
                Poll::Ready(Some(item)) => {
                    self.turn = (at + 1) % count;
                    return Poll::Ready(Some((at, item)));
                }
                Poll::Ready(None) => self.ended[at] = true,
                Poll::Pending => {}
            }
        }
        if self.ended.iter().all(|ended| *ended) { Poll::Ready(None) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Part for Vec<u32> {
        type Item = u32;
        fn poll_item(&mut self, _: &mut Context<'_>) -> Poll<Option<u32>> {
            Poll::Ready(self.pop())
        }
    }

    /// Has its item when it is asked again.
    struct Slow(Vec<Poll<Option<u32>>>);

    impl Part for Slow {
        type Item = u32;
        fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Option<u32>> {
            let next = self.0.pop().unwrap_or(Poll::Ready(None));
            if next.is_pending() {
                cx.waker().wake_by_ref();
            }
            next
        }
    }

    #[tokio::test]
    async fn one_that_has_ended_does_not_end_the_others() {
        let slow = Slow(vec![Poll::Ready(None), Poll::Ready(Some(7)), Poll::Pending]);
        let mut merged = Merged::new(vec![Slow(Vec::new()), slow]);
        assert_eq!(merged.next().await, Some((1, 7)));
        assert_eq!(merged.next().await, None);
    }

    #[tokio::test]
    async fn parts_take_turns_and_all_come_to_their_end() {
        let mut merged = Merged::new(vec![vec![3, 2, 1], vec![4], Vec::new()]);
        let mut found = Vec::new();
        while let Some(piece) = merged.next().await {
            found.push(piece);
        }
        assert_eq!(found, [(0, 1), (1, 4), (0, 2), (0, 3)]);
    }
}
