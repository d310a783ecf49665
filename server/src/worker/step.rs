//! One step: pages, forward pass, sampling.

use super::Worker;
use super::sequence::{Commit, Origin, State};
use crate::engine::FailureKind;
use crate::scheduler::{SeqId, Share};
use dsv4_model::sample::{Sampled, sample_among};
use dsv4_model::{Batch, CacheMem, LogitsWanted, SeqSpan};
use kv_pool::PoolKind;

impl Worker {
    /// Plans and runs one step, and hands out its tokens.
    pub(super) fn step(&mut self) {
        let mut planned = self.scheduler.plan().shares;
        self.reserve(&mut planned);
        let mut batch = Batch { seqs: Vec::with_capacity(planned.len()) };
        let mut shares = Vec::with_capacity(planned.len());
        for share in planned {
            match self.grow(share.id, share.tokens) {
                Ok(()) => {
                    if let Some(span) = self.span(share) {
                        batch.seqs.push(span);
                        shares.push(share);
                    }
                }
                Err(error) => {
                    let text = error.to_string();
                    self.end_failed(share.id, FailureKind::Unavailable, &text);
                }
            }
        }
        if shares.is_empty() {
            return;
        }
        let memory = CacheMem {
            block: self.pools.mem(PoolKind::Block),
            block_pages: self.pools.count(PoolKind::Block),
            window: self.pools.mem(PoolKind::Window),
            window_pages: self.pools.count(PoolKind::Window),
            carry: self.pools.mem(PoolKind::Carry),
            carry_pages: self.pools.count(PoolKind::Carry),
        };
        let result = self.model.forward(&mut self.workspace, &batch, &memory, &mut self.output);
        self.numbers.steps += 1;
        if let Err(error) = result {
            tracing::error!(%error, sequences = shares.len(), "forward pass failed");
            for share in shares {
                self.end_failed(share.id, FailureKind::Internal, "the forward pass failed");
            }
            return;
        }
        let mut row = 0;
        for (share, span) in shares.iter().zip(&batch.seqs) {
            let has_logits = span.logits == LogitsWanted::Last;
            self.advance(*share, has_logits.then_some(row));
            row += usize::from(has_logits);
        }
    }

    /// A share as the model wants it.
    fn span(&self, share: Share) -> Option<SeqSpan> {
        let seq = self.sequences.get(&share.id)?;
        let table = seq.table.as_ref()?;
        let from = seq.computed as usize;
        let to = from + share.tokens as usize;
        let is_last = to == seq.tokens.len();
        Some(SeqSpan {
            tokens: seq.tokens[from..to].to_vec(),
            start: seq.computed,
            blocks: table.block_indices().to_vec(),
            window_first: table.window_first_no(),
            window: table.window_indices().to_vec(),
            carry: table.carry().index,
            logits: if is_last { LogitsWanted::Last } else { LogitsWanted::None },
        })
    }

    /// Takes note of a computed share and draws the next token where it is due.
    fn advance(&mut self, share: Share, row: Option<usize>) {
        let id = share.id;
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        seq.computed += share.tokens;
        seq.tell_reach();
        let is_audit = matches!(seq.origin, Origin::Audit);
        if seq.state == State::Prefilling && !is_audit {
            self.numbers.prefill_tokens += u64::from(share.tokens);
        }
        let is_peer = matches!(seq.origin, Origin::Peer { .. });
        if let Err(error) = self.settle(id).and_then(|()| self.keep_boundary(id)) {
            panic!("seal, keep and recycle the pages of sequence {id}: {error}");
        }
        self.go_on(id);
        if is_audit {
            return self.end_window(id);
        }
        let sampled = row.map(|row| self.draw(id, row));
        match sampled {
            Some(Err(message)) => self.end_failed(id, FailureKind::Internal, &message),
            Some(Ok(sampled)) if is_peer => self.finish_push(id, sampled),
            Some(Ok(sampled)) => self.deliver(id, sampled),
            None if is_peer => self.offer_blocks(id),
            None => {}
        }
    }

    /// Starts the next leg of a prompt that has come to its stop.
    fn go_on(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        let end = seq.tokens.len() as u32;
        if seq.state == State::Prefilling && seq.computed == seq.leg_end && seq.computed < end {
            seq.leg_end = self.prefixes.stop(seq.computed, end);
            self.scheduler.start_prefill(id, seq.leg_end - seq.computed);
        }
    }

    fn draw(&mut self, id: SeqId, row: usize) -> Result<Sampled, String> {
        let vocab = self.model.config().vocab_size;
        let logits = &mut self.output.logits[row * vocab..(row + 1) * vocab];
        let Some(seq) = self.sequences.get_mut(&id) else {
            return Err("the sequence has gone".to_owned());
        };
        let allowed = seq.allowed(vocab).map_err(|error| error.to_string())?;
        let (prompt, output) = seq.tokens.split_at(seq.prompt_len);
        let position = seq.tokens.len() as u32;
        sample_among(logits, &seq.sampling, prompt, output, position, allowed.as_deref())
            .map_err(|error| error.to_string())
    }

    /// Gives a client its next token, and ends the sequence when it was the last.
    pub(super) fn deliver(&mut self, id: SeqId, sampled: Sampled) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        self.numbers.generation_tokens += 1;
        match seq.commit(sampled) {
            Commit::GoesOn => {
                seq.tell_reach();
                if seq.state != State::Decoding {
                    seq.enter(State::Decoding);
                    self.scheduler.start_decode(id);
                }
            }
            Commit::Ended => {
                self.numbers.ended[0] += 1;
                self.save_prefix(id, true);
                self.drop_sequence(id);
            }
            Commit::Gone => {
                self.numbers.ended[1] += 1;
                self.drop_sequence(id);
            }
            Commit::Failed(message) => self.end_failed(id, FailureKind::Internal, &message),
        }
    }
}
