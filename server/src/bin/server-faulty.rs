//! The test build of the server: the same program, with historical faults of other systems as switches.
//! `docs/faults.md` has them. It is for the corruption lab, and never for users.

#[path = "../main.rs"]
mod server;

fn main() -> std::process::ExitCode {
    dsv4_server::faults::allow();
    server::main()
}
