//! A prefill side in a process of its own, for tests and benches: serves pages with known bytes
//! until its standard input ends.
//!
//! `pd-peer tcp|shm ADDRESS` prints `listening ADDRESS`.

use pd_transfer::driver::{Driver, DriverConfig};
use pd_transfer::shm::{SharedRegion, Shm};
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::pages::{PageServer, Trusting};
use pd_transfer::transport::RegionOwner;
use pd_transfer::wire::{Fingerprint, Incarnation, Role};
use std::error::Error;
use std::io::{Read, Write};
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let kind = arguments.next().ok_or("want tcp or shm")?;
    let address = arguments.next().ok_or("want an address")?;
    let factory = match kind.as_str() {
        "tcp" => Tcp::factory(),
        "shm" => Shm::factory(2),
        other => return Err(format!("no transport {other:?}").into()),
    };
    let mut incarnation = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut incarnation)?;
    let memory: Arc<dyn RegionOwner> = SharedRegion::new(128 << 20)?;
    let server = PageServer::new(Arc::clone(&memory), 64);
    let mut config = DriverConfig::new(
        Role::Prefill,
        Incarnation(incarnation),
        Fingerprint([7; 16]),
        String::from("test pages"),
    );
    config.regions.push(memory);
    config.listen = Some(address);
    let upcalls = server.sink(Arc::new(|_| {}));
    let handle = Driver::spawn(config, factory, Arc::new(Trusting), upcalls)?;
    server.attach(handle.clone());
    let mut out = std::io::stdout();
    writeln!(out, "listening {}", handle.listen_address().unwrap_or_default())?;
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    handle.shutdown();
    Ok(())
}
