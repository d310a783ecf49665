//! Generates text with a checkpoint on the CPU, one prompt in one process.
//!
//! `cargo run --release -p dsv4-model --example generate -- [PROMPT] [CHECKPOINT_DIR]`

use dsa_kernels::CpuDevice;
use dsa_kernels::cpu::CpuKernels;
use dsv4_model::sample::{SamplingParams, sample};
use dsv4_model::text::Tokenizer;
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Session, SessionLimits};
use kv_pool::{IndexKeyType, Numerics};
use std::error::Error;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

const QUESTION: &str = "The code of the red vault in Oslo is 55231. The access key of the mixer of \
    Remi is AB12CD.\n\nWhat is the code of the red vault in Oslo?";
const MAX_TOKENS: usize = 200;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let prompt = args.next().unwrap_or_else(|| QUESTION.to_owned());
    let mini = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-mini/checkpoint");
    let dir = args.next().map_or_else(mini, PathBuf::from);

    let threads = std::thread::available_parallelism()?.get();
    let options = LoadOptions {
        numerics: Numerics::Official,
        index_key: IndexKeyType::Fp4,
        kernels: Arc::new(CpuKernels::from_env(threads)?),
    };
    let model = Arc::new(Model::load(&dir, options)?);
    let tokenizer = Tokenizer::from_dir(&dir)?;
    let mut tokens = tokenizer.encode_with_special("<｜begin▁of▁sentence｜><｜User｜>")?;
    tokens.extend(tokenizer.encode_plain(&prompt)?);
    tokens.extend(tokenizer.encode_with_special("<｜Assistant｜></think>")?);

    let eos = model.config().eos_token_id;
    let limits = SessionLimits { step_tokens: 512, seqs: 1, cached_tokens: tokens.len() + 256 };
    let mut session = Session::new(model, &CpuDevice::new(), limits)?;
    let mut seq = session.open()?;
    let mut logits = session.prefill(&mut seq, &tokens, 512)?.row(0).to_vec();
    let (params, mut output) = (SamplingParams::greedy(), Vec::new());
    let mut text = tokenizer.decode_stream();
    let mut stdout = std::io::stdout().lock();
    while output.len() < MAX_TOKENS {
        let position = u32::try_from(seq.len())?;
        let token = sample(&mut logits, &params, &tokens, &output, position)?.token;
        if token == eos {
            break;
        }
        output.push(token);
        write!(stdout, "{}", text.push(token)?)?;
        stdout.flush()?;
        let part = Part { seq: &mut seq, tokens: &[token], logits: LogitsWanted::Last };
        logits.copy_from_slice(session.step(&mut [part])?.row(0));
    }
    writeln!(stdout, "{}", text.finish())?;
    session.close(seq)?;
    Ok(())
}
