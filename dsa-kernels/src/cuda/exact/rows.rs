//! Cache rows and compressors.

use super::arena::{Call, code_of};
use crate::cuda::StoreDeviceRows;
use crate::cuda::abi::{ExactCompressArgs, ExactRowsArgs};
use crate::cuda::ops::rounding_code;
use crate::error::KernelError;
use crate::ops::{Compress, LoadRows, Pooling, Rounding, RowFormat, RowTarget, StoreRows};

type Done = Result<(), KernelError>;

fn words(targets: &[RowTarget]) -> Vec<u32> {
    targets.iter().flat_map(|target| [target.page, target.row]).collect()
}

pub(super) fn store(mut call: Call<'_>, a: &StoreRows<'_>) -> Done {
    let (rows, targets) = (call.input(&a.rows)?, call.u32s(&words(a.targets))?);
    let pages = call.pages(a.cache.mem)?;
    let count = a.targets.len();
    if matches!(a.cache.format, RowFormat::KvF32 | RowFormat::IndexF32) {
        let arguments = ExactRowsArgs {
            rows: call.address(&rows)?,
            targets: call.address(&targets)?,
            cache: call.cache(&pages, &a.cache)?,
            format: code_of(a.cache.format),
            count: count as u32,
        };
        call.launch("exact_store_f32", [count, 1, 1], 128, &arguments)?;
    } else {
        let store = StoreDeviceRows {
            rows: &rows,
            norm: None,
            table: None,
            rounding: Rounding::None,
            cache: pages.of(&a.cache),
            targets: &targets,
            count: count as u32,
            refused: None,
        };
        call.cuda().store_device_rows(call.stream(), &store)?;
    }
    call.give_back(&pages, a.cache.mem)
}

pub(super) fn load(mut call: Call<'_>, mut a: LoadRows<'_>) -> Done {
    let count = a.rows.rows();
    let (rows, sources) = (call.target(&a.rows)?, call.u32s(&words(a.sources))?);
    let pages = call.pages(a.cache.mem)?;
    let arguments = ExactRowsArgs {
        rows: call.address(&rows)?,
        targets: call.address(&sources)?,
        cache: call.cache(&pages, &a.cache)?,
        format: code_of(a.cache.format),
        count: count as u32,
    };
    call.launch("exact_load", [count, 1, 1], 128, &arguments)?;
    call.output(&mut a.rows, &rows)
}

pub(super) fn compress(mut call: Call<'_>, mut a: Compress<'_>) -> Done {
    let (kv, gate, ape) = (call.input(&a.kv)?, call.input(&a.gate)?, call.f32s(a.ape)?);
    let carry = call.pages(a.carry)?;
    let mut list = Vec::new();
    for seq in a.seqs {
        list.extend(seq.carry_offset.to_le_bytes());
        let part = seq.part;
        let numbers = [part.first as u32, part.count as u32, part.start_pos, seq.first_row as u32];
        list.extend(numbers.into_iter().flat_map(u32::to_le_bytes));
    }
    let seqs = call.bytes(&list)?;
    let rows = call.target(&a.rows)?;
    let arguments = ExactCompressArgs {
        kv: call.address(&kv)?,
        gate: call.address(&gate)?,
        ape: call.address(&ape)?,
        carry: carry.start()?,
        seqs: call.address(&seqs)?,
        rows: call.address(&rows)?,
        count: a.seqs.len() as u32,
        dim: a.dim as u32,
        rounding: rounding_code(a.rounding),
        reserved: 0,
    };
    let name = match a.pooling {
        Pooling::C4 => "exact_compress_c4",
        Pooling::C128 => "exact_compress_c128",
    };
    call.launch(name, [a.dim.div_ceil(128), a.seqs.len(), 1], 128, &arguments)?;
    call.give_back(&carry, a.carry)?;
    call.output(&mut a.rows, &rows)
}
