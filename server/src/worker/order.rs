//! Orders that a decode worker passes on to its prefill workers, and their end there.
//!
//! An order goes the way of a prompt, as an attempt without pages, so it needs no other connection, and
//! it is known of each whether it was carried out.

use super::{PeerKey, Worker, push};
use crate::engine::Flushed;
use crate::glue::order::{Order, decode_flushed, encode_flushed};
use pd_transfer::endpoint::Upcall;
use pd_transfer::manifest::Manifest;
use pd_transfer::receiver::Start;
use pd_transfer::wire::AttemptId;
use tokio::sync::mpsc::UnboundedSender;

/// The plan of an attempt without pages.
const NO_PLAN: [u8; 16] = [0; 16];

/// How an order fares at one prefill worker.
#[derive(Debug)]
pub enum OrderNews {
    /// It is on its way there.
    Sent {
        /// To whom.
        address: String,
    },
    /// It was carried out, or it is not known to have been.
    Ended {
        /// By whom.
        address: String,
        /// What was given up, or why it was not.
        outcome: Result<Flushed, String>,
    },
}

/// An order that has not been answered.
#[derive(Debug)]
pub(super) struct Pending {
    address: String,
    news: UnboundedSender<OrderNews>,
}

impl Pending {
    fn end(self, outcome: Result<Flushed, String>) {
        // Who asked may have gone.
        drop(self.news.send(OrderNews::Ended { address: self.address, outcome }));
    }
}

impl Worker {
    /// Tells every prefill worker to flush its cache; those that are not connected are named.
    pub(super) fn pass_flush(&mut self, stores: bool, news: &UnboundedSender<OrderNews>) {
        let peers: Vec<(PeerKey, String)> = self
            .peers
            .iter()
            .map(|(key, peer)| (*key, self.shared.name_of(&peer.address)))
            .collect();
        for (address, why) in self.shared.absent_peers() {
            let why = why.unwrap_or_else(|| "no connection was made yet".to_owned());
            let pending = Pending { address, news: news.clone() };
            pending.end(Err(format!("it is not connected: {why}")));
        }
        for ((driver, peer), address) in peers {
            let pending = Pending { address: address.clone(), news: news.clone() };
            let mut bytes = [0; 16];
            if let Err(error) = getrandom::fill(&mut bytes) {
                pending.end(Err(format!("no random bytes for the order's id: {error}")));
                continue;
            }
            let attempt = AttemptId(bytes);
            let request = Order::Flush { stores }.encode();
            let start =
                Start { attempt, peer, request, have: 0, plan_hash: NO_PLAN, plan: Vec::new() };
            drop(news.send(OrderNews::Sent { address }));
            let handle = self.link.as_ref().and_then(|link| link.drivers.get(driver));
            match handle.map(|driver| driver.start(start)) {
                Some(Ok(())) => drop(self.orders.insert(attempt, pending)),
                Some(Err(error)) => pending.end(Err(error.to_string())),
                None => pending.end(Err("there is no hand-off".to_owned())),
            }
        }
    }

    /// Takes what is about an order; gives back what is not.
    pub(super) fn order_news(&mut self, upcall: Upcall) -> Option<Upcall> {
        match &upcall {
            Upcall::Completed { attempt, record } => {
                let Some(pending) = self.orders.remove(attempt) else { return Some(upcall) };
                pending.end(decode_flushed(&record.payload).map_err(|error| error.to_string()));
            }
            Upcall::Failed { attempt, why } => {
                let Some(pending) = self.orders.remove(attempt) else { return Some(upcall) };
                tracing::warn!(peer = pending.address, "a flush was not passed on: {why}");
                pending.end(Err(why.to_string()));
            }
            _ => return Some(upcall),
        }
        None
    }

    /// Does what a decode worker says.
    pub(super) fn take_order(&mut self, attempt: AttemptId, peer: PeerKey, order: &[u8]) {
        let peer = self.peers.get(&peer).map_or("", |peer| peer.address.as_str()).to_owned();
        match Order::decode(order) {
            Ok(Order::Flush { stores }) => {
                let flushed = self.flush(stores);
                self.tell_flushed();
                tracing::info!(
                    peer,
                    device_blocks = flushed.blocks,
                    host_objects = flushed.host_objects,
                    disk_objects = flushed.stored_objects,
                    storage = stores,
                    "the cache was flushed, as a decode worker asked"
                );
                let record = Manifest::new().record(NO_PLAN, encode_flushed(flushed));
                self.command(attempt, |driver| driver.finish(attempt, record));
            }
            Err(error) => {
                tracing::warn!(peer, %error, "order refused");
                let text = error.to_string();
                let code = push::code::BAD_REQUEST;
                self.command(attempt, |driver| driver.reject(attempt, code, &text));
            }
        }
    }
}
