//! `ab`: runs a plan, searches for the factor that a fault needs, and makes reports.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

mod faulty;
mod search;

use ab::drive::{self, Subject};
use ab::judge::Ending;
use ab::matrix::Cell;
use ab::plan::Plan;
use ab::record::{self, Line};
use ab::replay::Log;
use ab::report::{CellLines, Report, power_note};
use ab::subject::Servers;
use ab::tally::Tally;
use ab::trace::{Answer, Trace};
use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::unbounded_channel;

/// Corruption lab: the same seeded requests to many configurations, judged and compared.
#[derive(Debug, Parser)]
#[command(name = "ab", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run all cells of a plan and report.
    Run(RunArgs),
    /// Search for the factors that a fault needs, between the healthy cell and a bad one.
    Bisect {
        /// What is run.
        #[command(flatten)]
        run: RunArgs,
        /// The bad cell, as factor=level,factor=level.
        #[arg(long, value_name = "CELL", required_unless_present = "fault")]
        bad: Option<String>,
        /// A fault of the plan that is injected in every cell, with the protection off.
        #[arg(long, value_name = "NAME")]
        fault: Option<String>,
    },
    /// Inject the faults of a plan into the test build of our server, with the protection off and on.
    Faults {
        /// What is run.
        #[command(flatten)]
        run: RunArgs,
        /// Only these faults; may be given several times.
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
    },
    /// Make the report of a run again, from its lines.
    Report {
        /// Folder of the run.
        dir: PathBuf,
    },
    /// Print the requests of a plan, one JSON object a line.
    Requests {
        /// Plan.
        plan: PathBuf,
    },
    /// Follow the pages of a request through workers that keep that (--trace-pages): the digest of
    /// each page at every stop, and the first stop at which one differs.
    ///
    /// Exit code 0 if none differs, 1 if one does, 2 if that is not known: no worker knows the request, one
    /// could not be asked, or pages came from one that was not. Of several requests with the name it is the
    /// last one.
    Trace(TraceArgs),
    /// Say how many answers tell a rate from none.
    Power,
}

#[derive(Clone, Debug, Args)]
struct TraceArgs {
    /// Name of the request: its header x-request-id.
    request: String,
    /// Address of a worker, like http://HOST:PORT; prefill and decode workers are all to be asked.
    #[arg(long, required = true, value_name = "URL")]
    url: Vec<String>,
    /// File for the same as one page of HTML.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Variable that holds the key for workers that want one.
    #[arg(long, default_value = "AB_API_KEY", value_name = "NAME")]
    api_key_variable: String,
}

#[derive(Clone, Debug, Args)]
struct RunArgs {
    /// Plan (TOML).
    plan: PathBuf,
    /// Our server's program, for cells without a url [default: target/release/server, and
    /// server-faulty there for faults].
    #[arg(long, value_name = "FILE")]
    server: Option<PathBuf>,
    /// Folder for lines, logs and the report; it is made.
    #[arg(long, default_value = "ab-out", value_name = "DIR")]
    out: PathBuf,
    /// Seed, instead of the plan's.
    #[arg(long)]
    seed: Option<u64>,
    /// Conversations, instead of the plan's: a rare fault needs many.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    sessions: Option<u32>,
    /// Variable that holds the key for servers that want one.
    #[arg(long, default_value = "AB_API_KEY", value_name = "NAME")]
    api_key_variable: String,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Run(args) => Lab::open(&args, SERVER).and_then(|lab| lab.run_all()),
        Task::Bisect { run, bad, fault } => {
            let server = if fault.is_some() { FAULTY_SERVER } else { SERVER };
            let lab = Lab::open(&run, server);
            lab.and_then(|lab| lab.search(bad.as_deref(), fault.as_deref()))
        }
        Task::Faults { run, only } => {
            Lab::open(&run, FAULTY_SERVER).and_then(|lab| lab.faults(&only))
        }
        Task::Report { dir } if faulty::is_of_faults(&dir) => faulty::report_again(&dir),
        Task::Report { dir } => report_again(&dir),
        Task::Requests { plan } => requests(&plan),
        Task::Trace(args) => return trace_end(&args),
        Task::Power => {
            println!("{}", power_note());
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Our server, as it is released.
const SERVER: &str = "target/release/server";
/// The test build of it.
const FAULTY_SERVER: &str = "target/release/server-faulty";

fn read_plan(path: &Path) -> Result<Plan> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("read {shown}"))?;
    Plan::read(&text).with_context(|| format!("plan {shown}"))
}

/// A plan, and what was recorded if that is asked again: the log beside the plan, and its text.
fn read_whole_plan(path: &Path, sessions: Option<u32>) -> Result<(Plan, Option<String>)> {
    let mut plan = read_plan(path)?;
    plan.workload.sessions = sessions.unwrap_or(plan.workload.sessions);
    let Some(file) = &plan.workload.requests else { return Ok((plan, None)) };
    let log = path.parent().unwrap_or(Path::new("")).join(file);
    let shown = log.display().to_string();
    let bytes =
        std::fs::read(&log).with_context(|| format!("plan {}: read {shown}", path.display()))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
        anyhow::anyhow!("{shown}: line {line}: no UTF-8")
    })?;
    plan.workload.replay(Log::read(&text).with_context(|| shown)?);
    Ok((plan, Some(text)))
}

fn requests(path: &Path) -> Result<()> {
    let (plan, _) = read_whole_plan(path, None)?;
    let mut out = std::io::stdout().lock();
    for ask in plan.workload.all(plan.seed) {
        // Whoever reads may have enough.
        if writeln!(out, "{}", ask.body).is_err() {
            break;
        }
    }
    Ok(())
}

/// Asks workers for the pages of a request, and shows them.
/// A digest that differs is another end than a trace that cannot be had.
fn trace_end(args: &TraceArgs) -> ExitCode {
    match trace(args) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Whether a digest differs.
fn trace(args: &TraceArgs) -> Result<bool> {
    let api_key = ab::config::variable(&args.api_key_variable);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut answers, mut silent) = (Vec::new(), 0);
    for url in &args.url {
        let url = format!("{}/trace/{}", url.trim_end_matches('/'), encoded(&args.request));
        match runtime.block_on(drive::get(&url, api_key.as_deref())) {
            Ok((200, body)) => match serde_json::from_str::<Answer>(&body) {
                Ok(answer) => answers.push(answer),
                Err(error) => {
                    silent += 1;
                    eprintln!("{url} answers something else: {error}");
                }
            },
            // It may not have been there.
            Ok((404, body)) => eprintln!("{url}: {body}"),
            Ok((status, body)) => {
                silent += 1;
                eprintln!("{url} answers {status}: {body}");
            }
            Err(error) => {
                silent += 1;
                eprintln!("{error}");
            }
        }
    }
    if answers.is_empty() {
        bail!(
            "no worker that was asked knows anything of the pages of request {}; a router has none: \
             ask the workers, which keep them with --trace-pages",
            args.request
        );
    }
    let trace = Trace::join(&args.request, &answers);
    print!("{}", trace.text());
    if let Some(path) = &args.html {
        std::fs::write(path, trace.html()).with_context(|| format!("write {}", path.display()))?;
    }
    if silent > 0 && !trace.differs() {
        bail!("{silent} of {} workers could not be asked", args.url.len());
    }
    if trace.lacks_source && !trace.differs() {
        bail!("nothing that was seen differs, but not all was seen: ask the prefill workers too");
    }
    Ok(trace.differs())
}

/// A name as a part of an address.
fn encoded(name: &str) -> String {
    let is_plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'~');
    let part = |b: u8| if is_plain(&b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    name.bytes().map(part).collect()
}

/// Where a run keeps what it was.
const PLAN_FILE: &str = "plan.toml";
/// Where it keeps the recorded requests that it asked.
const REQUESTS_FILE: &str = "requests.jsonl";

fn file_of(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("cell-{number:02}.jsonl"))
}

fn write_lines(path: &Path, lines: &[Line]) -> Result<()> {
    let mut text = String::new();
    for line in lines {
        text += &serde_json::to_string(line).context("write a line")?;
        text.push('\n');
    }
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// A line on standard output, which nobody need read to its end.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Takes away what an earlier run has left: its lines would be taken for those of this one.
fn clear(dir: &Path) -> Result<()> {
    let is_ours = |name: &str| {
        let numbered = ["cell-", "bisect-", "reference-"].iter().any(|s| name.starts_with(s));
        let whole = ["report.md", "report.html", "faults.md", faulty::RUNS_FILE];
        whole.contains(&name) || (numbered && (name.ends_with(".jsonl") || name.ends_with(".log")))
    };
    for entry in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if is_ours(&name) {
            std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Lines of a cell, which are of no other.
fn lines_of(path: &Path, cell: &str) -> Result<Vec<Line>> {
    let shown = path.display();
    let bytes = std::fs::read(path).with_context(|| format!("read {shown}"))?;
    let lines =
        record::read(&String::from_utf8_lossy(&bytes)).with_context(|| shown.to_string())?;
    if let Some(other) = lines.iter().find(|line| line.cell != cell) {
        bail!("{shown} has lines of {}, and the plan has {cell} there", other.cell);
    }
    Ok(lines)
}

/// Reads the lines of a run and writes its report.
fn report_again(dir: &Path) -> Result<()> {
    let plan = read_plan(&dir.join(PLAN_FILE))?;
    if search::is_of_search(dir) {
        bail!("{} is of a search, whose lines (bisect-NN.jsonl) are of no matrix", dir.display());
    }
    let all = plan.cells()?;
    let (mut cells, mut places) = (Vec::new(), BTreeMap::new());
    for (number, cell) in all.iter().enumerate() {
        let path = file_of(dir, number);
        if !path.exists() {
            say(&format!("{} is not there: the run did not come so far", path.display()));
            continue;
        }
        let lines = lines_of(&path, &plan.factors.name(cell))?;
        let reference = plan.reference(cell).map(|cell| {
            let name = plan.factors.name(&cell);
            places.get(&cell).copied().with_context(|| format!("the lines of {name} are not there"))
        });
        let reference = reference.transpose().with_context(|| {
            format!("{} cannot be held against what it must equal", plan.factors.name(cell))
        })?;
        places.insert(cell.clone(), cells.len());
        cells.push(CellLines { name: plan.factors.name(cell), lines, reference });
    }
    if cells.is_empty() {
        bail!("{} has no lines of any cell", dir.display());
    }
    let command = format!("ab run {} --out DIR", dir.join(PLAN_FILE).display());
    let report = Report::new(&cells, plan.logprob_distance, &command);
    std::fs::write(dir.join("report.md"), report.markdown()).context("write report.md")?;
    std::fs::write(dir.join("report.html"), report.html()).context("write report.html")?;
    let (judged, corrupted) = report.total();
    let of = if is_ours(&plan) { ".protected" } else { "" };
    say(&format!(
        "{}\nreport: {}\nfigure ab.judged{of} {judged} answers\n\
         figure ab.corrupted{of} {corrupted} answers",
        report.markdown(),
        dir.join("report.html").display()
    ));
    Ok(())
}

/// Whether all cells are our server as it is released.
fn is_ours(plan: &Plan) -> bool {
    let mut levels = plan.factors.0.iter().flat_map(|factor| &factor.levels);
    let is_injected = |flags: &[String]| flags.iter().any(|flag| flag.starts_with("--fault"));
    !is_injected(&plan.flags)
        && levels.all(|level| level.url.is_none() && !is_injected(&level.flags))
}

/// Takes the servers along when a signal ends this process.
#[expect(clippy::exit, reason = "the other threads wait for servers that have just been ended")]
fn end_with_signals(runtime: &tokio::runtime::Runtime) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let _entered = runtime.enter();
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let mut signals = signal(kind).context("listen for signals")?;
        runtime.spawn(async move {
            if signals.recv().await.is_some() {
                ab::subject::end_all();
                // As a shell says it of a process that the signal ended.
                std::process::exit(128 + kind.as_raw_value());
            }
        });
    }
    Ok(())
}

/// A plan that is being run.
struct Lab {
    plan: Plan,
    server: PathBuf,
    out: PathBuf,
    api_key: Option<String>,
    /// The command says how many conversations there are.
    is_told_sessions: bool,
    runtime: tokio::runtime::Runtime,
}

impl Lab {
    fn open(args: &RunArgs, server: &str) -> Result<Self> {
        let (mut plan, recorded) = read_whole_plan(&args.plan, args.sessions)?;
        plan.seed = args.seed.unwrap_or(plan.seed);
        plan.check().context("with the flags")?;
        std::fs::create_dir_all(&args.out)
            .with_context(|| format!("make {}", args.out.display()))?;
        clear(&args.out)?;
        if let Some(text) = recorded {
            let path = args.out.join(REQUESTS_FILE);
            std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
            plan.workload.requests = Some(REQUESTS_FILE.to_owned());
        }
        let text = toml::to_string(&plan).context("write the plan down")?;
        std::fs::write(args.out.join(PLAN_FILE), text).context("write the plan down")?;
        let api_key = ab::config::variable(&args.api_key_variable);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("start the client's threads")?;
        end_with_signals(&runtime)?;
        let server = args.server.clone().unwrap_or_else(|| server.into());
        let (out, is_told_sessions) = (args.out.clone(), args.sessions.is_some());
        Ok(Self { plan, server, out, api_key, is_told_sessions, runtime })
    }

    fn run_all(&self) -> Result<()> {
        let cells = self.plan.cells()?;
        let place = |cell: &Cell| cells.iter().position(|known| known == cell);
        for (number, cell) in cells.iter().enumerate() {
            let name = self.plan.factors.name(cell);
            say(&format!("{} of {}: {name}", number + 1, cells.len()));
            let mut started = self.start(cell, &format!("cell-{number:02}"))?;
            let begun = Instant::now();
            let lines = started.ask(self, &name, 0..self.plan.workload.sessions)?;
            let took = begun.elapsed();
            write_lines(&file_of(&self.out, number), &lines)?;
            let reference =
                self.plan.reference(cell).and_then(|other| Some((place(&other)?, other)));
            let reference = reference.map(|(number, other)| {
                lines_of(&file_of(&self.out, number), &self.plan.factors.name(&other))
            });
            let against = (reference.transpose()?, self.plan.logprob_distance);
            say(&format!("  {}", summary(&lines, &against, took)));
            some_answer(&name, &lines)?;
        }
        report_again(&self.out)
    }

    /// The servers of a cell.
    fn start(&self, cell: &Cell, name: &str) -> Result<Started> {
        let setup = self.plan.factors.setup(cell, self.plan.at_once);
        let at_once = setup.at_once;
        if let Some(url) = setup.url.clone() {
            return Ok(Started { url, at_once, servers: None });
        }
        let servers = Servers::start(&self.server, &setup, &self.plan.flags, (&self.out, name))?;
        Ok(Started { url: servers.url.clone(), at_once, servers: Some(servers) })
    }
}

/// Lines that others are held against, and how far their log probabilities may be.
type Against = (Option<Vec<Line>>, Option<f64>);

/// What came of a cell, in a line.
fn summary(lines: &[Line], (reference, distance): &Against, took: Duration) -> String {
    let tally = Tally::compared(lines, reference.as_deref(), *distance);
    format!(
        "{} judged, {} corrupted, {} refused, {} lost, in {:.0} s",
        tally.judged(),
        tally.corrupted,
        tally.refused,
        tally.lost,
        took.as_secs_f64()
    )
}

/// A cell in which nothing was answered shows nothing: says why.
fn some_answer(name: &str, lines: &[Line]) -> Result<()> {
    if lines.iter().any(|line| line.verdict.is_judged()) {
        return Ok(());
    }
    let why = lines.first().map(|line| match &line.ending {
        Ending::Refused { status, body } => format!("status {status}: {body}"),
        Ending::Lost(why) => why.clone(),
        Ending::Answered(_) => "its client left".to_owned(),
    });
    bail!("no request of {name} was answered; the first one: {}", why.unwrap_or_default())
}

/// A server that can be asked.
struct Started {
    url: String,
    at_once: u32,
    servers: Option<Servers>,
}

impl Started {
    /// Asks what some sessions of the plan say.
    fn ask(&mut self, lab: &Lab, cell: &str, sessions: Range<u32>) -> Result<Vec<Line>> {
        let subject = Subject {
            url: self.url.clone(),
            api_key: lab.api_key.clone(),
            answer: Duration::from_secs(lab.plan.answer_s.into()),
        };
        let (send, mut receive) = unbounded_channel();
        let work = (cell.to_owned(), lab.plan.workload.clone(), lab.plan.seed);
        lab.runtime.block_on(async {
            let asked = tokio::spawn(drive::run(subject, work, sessions, self.at_once, send));
            let mut lines = Vec::new();
            while let Some(line) = receive.recv().await {
                lines.push(line);
            }
            asked.await.context("a client panicked")??;
            // As they were asked, whichever ended first.
            lines.sort_by_key(Line::place);
            Ok(lines)
        })
    }
}
