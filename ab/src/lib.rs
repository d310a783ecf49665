//! The corruption lab: finds which part of a serving system changes its answers.
//!
//! A [`plan`] names a [`workload`] of requests that follow from a seed byte for byte, and the factors
//! that are varied ([`matrix`]).
//! Each cell is asked the same; every answer is judged ([`judge`]) and written down as a line
//! ([`record`]), from which all figures of a [`report`] can be computed again.
//! Cells are compared request by request ([`tally`], [`stats`]), and a search ([`matrix::Bisection`])
//! runs the cells that tell which factors a fault needs.
//!
//! Only [`drive`] and [`subject`] touch network and processes.

#![forbid(unsafe_code)]

pub mod config;
pub mod drive;
pub mod fault;
pub mod judge;
pub mod matrix;
pub mod metrics;
pub mod plan;
pub mod record;
pub mod replay;
pub mod report;
pub mod rng;
pub mod sse;
pub mod stats;
pub mod subject;
pub mod tally;
mod text;
pub mod trace;
pub mod workload;
