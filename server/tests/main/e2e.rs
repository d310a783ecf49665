//! End to end: real processes, real HTTP, the mini model.

#[path = "e2e/accounts.rs"]
mod accounts;
#[path = "e2e/boundaries.rs"]
mod boundaries;
#[path = "e2e/cache.rs"]
mod cache;
#[path = "e2e/client.rs"]
mod client;
#[path = "e2e/cluster.rs"]
mod cluster;
#[path = "e2e/constrained.rs"]
mod constrained;
#[path = "e2e/corpus.rs"]
mod corpus;
#[path = "e2e/damage.rs"]
mod damage;
#[path = "e2e/deploy.rs"]
mod deploy;
#[path = "e2e/discovery.rs"]
mod discovery;
#[path = "e2e/edge.rs"]
mod edge;
#[path = "e2e/evidence.rs"]
mod evidence;
#[path = "e2e/fault_run.rs"]
mod fault_run;
#[path = "e2e/faulted.rs"]
mod faulted;
#[path = "e2e/folder.rs"]
mod folder;
#[path = "e2e/found.rs"]
mod found;
#[path = "e2e/injected.rs"]
mod injected;
#[path = "e2e/kv_events.rs"]
mod kv_events;
#[path = "e2e/node_clients.rs"]
mod node_clients;
#[path = "e2e/page.rs"]
mod page;
#[path = "e2e/prefix.rs"]
mod prefix;
#[path = "e2e/processes.rs"]
mod processes;
#[path = "e2e/prompts.rs"]
mod prompts;
#[path = "e2e/python_clients.rs"]
mod python_clients;
#[path = "e2e/remote.rs"]
mod remote;
#[path = "e2e/retraction.rs"]
mod retraction;
#[path = "e2e/same_answers.rs"]
mod same_answers;
#[path = "e2e/service.rs"]
mod service;
#[path = "e2e/sessions.rs"]
mod sessions;
#[path = "e2e/start_stop.rs"]
mod start_stop;
#[path = "e2e/tamper.rs"]
mod tamper;
#[path = "e2e/traces.rs"]
mod traces;
#[path = "e2e/turns.rs"]
mod turns;
#[path = "e2e/turns_of_keys.rs"]
mod turns_of_keys;
#[path = "e2e/verify.rs"]
mod verify;
#[path = "e2e/warm.rs"]
mod warm;
#[path = "e2e/workers.rs"]
mod workers;
