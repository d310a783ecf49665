//! `ab`: runs a plan, searches for the factor that a fault needs, and makes reports.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

mod faulty;

use ab::drive::{self, Subject};
use ab::judge::Ending;
use ab::matrix::{Bisection, Cell, Conclusion, Finding};
use ab::plan::Plan;
use ab::record::{self, Line};
use ab::report::{Report, power_note, shown};
use ab::stats::Rate;
use ab::subject::Servers;
use ab::tally::{Pairs, Tally};
use ab::trace::{Answer, Trace};
use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};
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
    /// Exit code 0 if none differs, 1 if one does, 2 if that is not known: no worker knows the request, or one
    /// could not be asked.
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

fn requests(path: &Path) -> Result<()> {
    let plan = read_plan(path)?;
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
        let url = format!("{}/trace/{}", url.trim_end_matches('/'), args.request);
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
    Ok(trace.differs())
}

/// Where a run keeps what it was.
const PLAN_FILE: &str = "plan.toml";

fn file_of(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("cell-{number:02}.jsonl"))
}

/// Where a search keeps the lines of its cells, the healthy one first.
fn search_file(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("bisect-{number:02}.jsonl"))
}

fn write_lines(path: &Path, lines: &[Line]) -> Result<()> {
    let mut text = String::new();
    for line in lines {
        text += &serde_json::to_string(line).context("write a line")?;
        text.push('\n');
    }
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Reads the lines of a run and writes its report.
fn report_again(dir: &Path) -> Result<()> {
    let plan = read_plan(&dir.join(PLAN_FILE))?;
    let mut cells = Vec::new();
    for (number, cell) in plan.cells()?.iter().enumerate() {
        let path = file_of(dir, number);
        if !path.exists() {
            println!("{} is not there: the run did not come so far", path.display());
            continue;
        }
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let lines = record::read(&text).with_context(|| path.display().to_string())?;
        cells.push((plan.factors.name(cell), lines));
    }
    if cells.is_empty() {
        bail!("{} has no lines of any cell", dir.display());
    }
    let command = format!("ab run {}", dir.join(PLAN_FILE).display());
    let report = Report::new(&cells, plan.same_answers, &command);
    std::fs::write(dir.join("report.md"), report.markdown()).context("write report.md")?;
    std::fs::write(dir.join("report.html"), report.html()).context("write report.html")?;
    print!("{}", report.markdown());
    println!("\nreport: {}", dir.join("report.html").display());
    let (judged, corrupted) = report.total();
    let of = if is_ours(&plan) { ".protected" } else { "" };
    println!("figure ab.judged{of} {judged} answers\nfigure ab.corrupted{of} {corrupted} answers");
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
    for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
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
    runtime: tokio::runtime::Runtime,
}

impl Lab {
    fn open(args: &RunArgs, server: &str) -> Result<Self> {
        let mut plan = read_plan(&args.plan)?;
        plan.seed = args.seed.unwrap_or(plan.seed);
        plan.workload.sessions = args.sessions.unwrap_or(plan.workload.sessions);
        plan.check().context("with the flags")?;
        std::fs::create_dir_all(&args.out)
            .with_context(|| format!("make {}", args.out.display()))?;
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
        let out = args.out.clone();
        Ok(Self { plan, server, out, api_key, runtime })
    }

    fn run_all(&self) -> Result<()> {
        let cells = self.plan.cells()?;
        for (number, cell) in cells.iter().enumerate() {
            let name = self.plan.factors.name(cell);
            println!("{} of {}: {name}", number + 1, cells.len());
            let mut started = self.start(cell, &format!("cell-{number:02}"))?;
            let begun = Instant::now();
            let lines = started.ask(self, &name, 0..self.plan.workload.sessions)?;
            println!("  {}", summary(&lines, begun.elapsed()));
            write_lines(&file_of(&self.out, number), &lines)?;
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

    /// A search between the healthy cell and a bad one, perhaps with a fault of the plan.
    fn search(mut self, bad: Option<&str>, fault: Option<&str>) -> Result<()> {
        let fault = fault.map(|name| self.plan.fault(name).cloned()).transpose()?;
        let factors = &self.plan.factors;
        let bad = match (bad, &fault) {
            (Some(bad), _) => factors.cell(bad)?,
            (None, Some(fault)) => fault.bad(factors)?,
            (None, None) => bail!("no bad cell is named"),
        };
        if let Some(fault) = fault {
            self.plan.flags.extend(fault.flags.iter().cloned().chain(fault.injected(false)));
        }
        self.bisect(bad)
    }

    /// Runs cells until it is clear which factors the fault needs.
    fn bisect(&self, bad: Cell) -> Result<()> {
        let factors = &self.plan.factors;
        let healthy = factors.healthy();
        if healthy == bad {
            bail!("the bad cell is the healthy one: every factor has its first level");
        }
        let sessions = 0..self.plan.workload.sessions;
        let name = factors.name(&healthy);
        println!("{name} (healthy)");
        let reference = self.start(&healthy, "cell-00")?.ask(self, &name, sessions)?;
        write_lines(&search_file(&self.out, 0), &reference)?;
        some_answer(&name, &reference)?;
        let words = |factors: &[usize]| self.plan.factors.words(&bad, factors);
        let mut search = Bisection::new(healthy.clone(), bad.clone());
        let own = Tally::new(&reference, None);
        println!("  not right: {}", shown(&own.failure()));
        let is_clean = own.corrupted == 0;
        search.handle_finding(healthy, if is_clean { Finding::Clean } else { Finding::Bad });
        let (mut rate, mut number) = (None, 0);
        while let Some(cell) = search.poll_cell() {
            number += 1;
            let (finding, seen) = self.find((&cell, number), &reference, rate)?;
            if number == 1 && finding == Finding::Unclear {
                bail!(
                    "the bad cell has shown neither that it is worse than the healthy one nor that it \
                     is not: more sessions may tell"
                );
            }
            rate = rate.or(Some(seen));
            search.handle_finding(cell, finding);
        }
        let conclusion = search.poll_conclusion().context("the search ended without a word")?;
        println!("\n{}", said(&conclusion, &words));
        Ok(())
    }

    /// Runs a cell until it is clear whether the fault shows there, at most through the whole workload.
    /// `rate` is how often it showed in the bad cell.
    fn find(
        &self,
        (cell, number): (&Cell, usize),
        reference: &[Line],
        rate: Option<f64>,
    ) -> Result<(Finding, f64)> {
        let name = self.plan.factors.name(cell);
        println!("{name}");
        let mut started = self.start(cell, &format!("cell-{number:02}"))?;
        let (all, step) = (self.plan.workload.sessions, started.at_once.max(16));
        let mut lines: Vec<Line> = Vec::new();
        let mut from = 0;
        while from < all {
            let to = all.min(from.saturating_add(step));
            lines.extend(started.ask(self, &name, from..to)?);
            from = to;
            let (finding, seen) = judge_cell(&lines, reference, self.plan.same_answers, rate);
            if finding != Finding::Unclear || from == all {
                write_lines(&search_file(&self.out, number), &lines)?;
                let tally = Tally::new(&lines, None);
                println!(
                    "  {} after {} answers; not right: {}",
                    finding.name(),
                    tally.judged(),
                    shown(&tally.failure())
                );
                return Ok((finding, seen));
            }
        }
        Ok((Finding::Unclear, 0.0))
    }
}

fn said(conclusion: &Conclusion, words: &dyn Fn(&[usize]) -> String) -> String {
    match conclusion {
        Conclusion::Needs(factors) => format!("the fault needs: {}", words(factors)),
        Conclusion::AnyOf(factors) => {
            format!("any of these alone brings the fault: {}", words(factors))
        }
        Conclusion::NothingToFind(why) => (*why).to_owned(),
        Conclusion::Open(factors) if factors.is_empty() => {
            "undecided: more sessions may tell".to_owned()
        }
        Conclusion::Open(factors) => {
            format!("undecided, but these are needed: {}", words(factors))
        }
    }
}

/// What came of a cell, in a line.
fn summary(lines: &[Line], took: Duration) -> String {
    let tally = Tally::new(lines, None);
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

/// Whether a fault shows in the lines of a cell.
fn judge_cell(
    lines: &[Line],
    reference: &[Line],
    same_answers: bool,
    rate: Option<f64>,
) -> (Finding, f64) {
    let tally = Tally::new(lines, same_answers.then_some(reference));
    let pairs = Pairs::new(lines, reference);
    let failure = tally.failure();
    let is_worse = pairs.only_first > pairs.only_second && pairs.p() < 0.05;
    if is_worse || (same_answers && tally.corrupted > 0) {
        return (Finding::Bad, failure.value());
    }
    // Half of what the bad cell showed would have been seen: in signs, or in what is wrong here alone.
    let expected = rate.unwrap_or(0.02) / 2.0;
    let seen = Rate::new(pairs.only_first.max(tally.corrupted), tally.judged());
    if tally.corrupted == 0 && seen.high < expected.max(0.01) {
        return (Finding::Clean, failure.value());
    }
    (Finding::Unclear, failure.value())
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
