//! What can happen at a node, worked out once per node state.

use super::Setup;
use super::node::{Ask, Flight, Node};
use pd_transfer::wire::AttemptId;

/// What the search asks of a node again and again.
#[derive(Debug)]
pub(super) struct View {
    pub(super) flights: Vec<(u64, Flight)>,
    pub(super) verifies: Vec<u64>,
    pub(super) starts: Vec<u8>,
    pub(super) running: Vec<u8>,
    pub(super) computes: Vec<(AttemptId, bool)>,
    pub(super) writes: Vec<(AttemptId, usize)>,
    pub(super) offered: Vec<usize>,
    pub(super) has_timer: bool,
    pub(super) is_ended: bool,
    pub(super) is_at_rest: bool,
    pub(super) is_refused: bool,
}

impl View {
    pub(super) fn of(setup: &Setup, node: &Node) -> Self {
        let (computes, writes) = node.work();
        let asks = || (0_u8..).zip(&node.asks);
        let is_slot_free = !setup.is_slots || node.runs.is_empty();
        let can_start = node.link.is_some() && node.free_pages() >= setup.pages && is_slot_free;
        let pending = |(request, ask): (u8, &Ask)| {
            (can_start && matches!(ask, Ask::Pending { .. })).then_some(request)
        };
        let running =
            |(request, ask): (u8, &Ask)| matches!(ask, Ask::Running { .. }).then_some(request);
        Self {
            flights: node.flights.iter().map(|(op, flight)| (*op, flight.clone())).collect(),
            verifies: node.verifying.keys().copied().collect(),
            starts: asks().filter_map(pending).collect(),
            running: asks().filter_map(running).collect(),
            computes: computes.into_iter().map(|id| (id, node.is_last(&id))).collect(),
            writes,
            offered: node.offered(),
            has_timer: node.endpoint.poll_timeout().is_some_and(|at| at.0 < 1 << 39),
            is_ended: node.is_ended(),
            is_at_rest: node.is_at_rest(),
            is_refused: node.is_refused,
        }
    }
}
