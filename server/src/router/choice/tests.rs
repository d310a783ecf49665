//! Tests of the choice: sessions stick, hot workers shed, dead ones are forgotten, bounds hold.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::VecDeque;

const KEY: HashKey = HashKey([7; 32]);
const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);
const C: WorkerId = WorkerId(3);
const NOW: Duration = Duration::from_secs(5);

fn over(config: ChoiceConfig, workers: &[WorkerId]) -> Choice {
    let mut choice = Choice::new(config);
    workers.iter().for_each(|&worker| choice.handle_joined(worker));
    choice
}

fn prompt(body: &Value) -> Prompt {
    Prompt::of(&KEY, Tenant::default(), body.to_string().as_bytes())
}

/// A conversation whose turns have a block each.
fn turns(session: usize, count: usize) -> Prompt {
    let turn = |n: usize| json!({"role": "user", "content": format!("{session}:{n} ").repeat(256)});
    prompt(&json!({"messages": (0..count).map(turn).collect::<Vec<_>>()}))
}

#[test]
fn a_longer_conversation_begins_like_the_shorter_one() {
    let (short, long) = (turns(1, 3), turns(1, 5));
    assert!(short.chain().len() >= 3 && long.chain().len() > short.chain().len());
    // The closing of the last message's block is the only difference.
    assert_eq!(long.chain()[..short.chain().len()], *short.chain());
    assert!(turns(2, 3).chain().iter().all(|hash| !short.chain().contains(hash)));
    // Where a field stands in the body does not matter, what it says does.
    let system = "s".repeat(3000);
    let front = prompt(&json!({"system": system, "messages": ["m"], "stream": true}));
    assert_eq!(front, prompt(&json!({"messages": ["m"], "system": system})));
    assert_ne!(front.chain(), prompt(&json!({"system": "t".repeat(3000)})).chain());
    assert_eq!(front.chain(), prompt(&json!({"system": system, "messages": ["n"]})).chain());
}

#[test]
fn token_ids_have_blocks_of_256() {
    let ids: Vec<u32> = (0..600).collect();
    let whole = prompt(&json!({"prompt": ids}));
    assert_eq!((whole.blocks(), whole.chain().len()), (3, 2));
    assert_eq!(prompt(&json!({"prompt": ids[..512]})).chain(), whole.chain());
    assert_eq!(prompt(&json!({"prompt": ids[..512]})).blocks(), 2);
    assert_eq!(prompt(&json!({"input_ids": ids})), whole);
}

#[test]
fn what_is_no_prompt_has_one_block_and_no_hash() {
    for body in ["", "[1]", "{\"prompt\":", "\u{0}", "{\"prompt\":1,\"prompt\":2}"] {
        let found = Prompt::of(&KEY, Tenant::default(), body.as_bytes());
        assert_eq!((found.blocks(), found.chain()), (1, &[][..]), "{body}");
    }
    assert_eq!(prompt(&json!({})).blocks(), 1);
    let nested = "[".repeat(100_000);
    let found = Prompt::of(&KEY, Tenant::default(), format!("{{\"prompt\":{nested}").as_bytes());
    assert_eq!(found.blocks(), 1);
    assert_eq!(Prompt::none().blocks(), 0);
    let huge = prompt(&json!({"prompt": "x".repeat((BLOCKS_MAX + 3) * BLOCK_BYTES)}));
    assert_eq!((huge.blocks() as usize, huge.chain().len()), (BLOCKS_MAX + 3, BLOCKS_MAX));
}

#[test]
fn one_tenants_prompts_do_not_show_to_another() {
    let body = json!({"prompt": "p".repeat(2048)}).to_string();
    let chain = |key: &HashKey, tenant: Tenant<'_>, body: &str| {
        Prompt::of(key, tenant, body.as_bytes()).chain().to_vec()
    };
    let own = chain(&KEY, Tenant::default(), &body);
    let other = Tenant { authorization: b"Bearer other", ..Tenant::default() };
    assert_ne!(chain(&KEY, other, &body), own);
    assert_ne!(chain(&KEY, Tenant { api_key: b"other", ..Tenant::default() }, &body), own);
    assert_ne!(chain(&HashKey([8; 32]), Tenant::default(), &body), own);
    for field in [
        json!({"user": "u"}),
        json!({"cache_salt": "s"}),
        json!({"model": "m"}),
        json!({"metadata": {"user_id": "u"}}),
    ] {
        let mut body: Value = serde_json::from_str(&body).unwrap();
        body.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
        assert_ne!(chain(&KEY, Tenant::default(), &body.to_string()), own, "{field}");
    }
}

#[test]
fn a_session_stays_with_its_worker() {
    let mut choice = over(ChoiceConfig::default(), &[A, B, C]);
    let mut homes = Vec::new();
    for session in 0..6 {
        let chosen = choice.choose(NOW, &turns(session, 4), &[A, B, C]).unwrap();
        assert_eq!(chosen.overlap_blocks, 0);
        homes.push(chosen.worker);
        choice.handle_ended(chosen);
    }
    for worker in [A, B, C] {
        assert_eq!(homes.iter().filter(|&&home| home == worker).count(), 2, "{homes:?}");
    }
    for (session, &home) in homes.iter().enumerate() {
        for count in 5..9 {
            let chosen = choice.choose(NOW, &turns(session, count), &[A, B, C]).unwrap();
            assert_eq!(chosen.worker, home);
            assert!(chosen.overlap_blocks >= 4);
            choice.handle_ended(chosen);
        }
    }
    for worker in [A, B, C] {
        assert_eq!(choice.uncached_under_way(worker), 0);
    }
}

#[test]
fn a_hot_worker_sheds() {
    let mut choice = over(ChoiceConfig::default(), &[A, B]);
    let first = choice.choose(NOW, &turns(1, 8), &[A, B]).unwrap();
    let home = first.worker;
    choice.handle_ended(first);
    // As long as the home is no busier than the other by more than it saves, it is the one.
    let prompts: Vec<Prompt> = (0..40).map(|n| turns(1, 8 + n % 3)).collect();
    let all: Vec<Chosen> =
        prompts.iter().map(|prompt| choice.choose(NOW, prompt, &[A, B]).unwrap()).collect();
    assert_eq!(all[0].worker, home);
    let at_home = all.iter().filter(|chosen| chosen.worker == home).count();
    assert!((15..=30).contains(&at_home), "{at_home} of 40");
    // Long prompts that are being computed make it hot at once.
    let mut choice = over(ChoiceConfig::default(), &[A, B]);
    let first = choice.choose(NOW, &turns(1, 8), &[A, B]).unwrap();
    let (home, other) = if first.worker == A { (A, B) } else { (B, A) };
    choice.handle_ended(first);
    let mut long = choice.choose(NOW, &turns(2, 200), &[home]).unwrap();
    let shed = choice.choose(NOW, &turns(1, 8), &[A, B]).unwrap();
    assert_eq!((shed.worker, shed.overlap_blocks), (other, 0));
    // Once they are computed it is the home again.
    choice.handle_first_token(&mut long);
    assert_eq!(choice.choose(NOW, &turns(1, 9), &[home, C]).unwrap().worker, home);
}

#[test]
fn beyond_the_balance_thresholds_only_load_counts() {
    let config = ChoiceConfig { balance_abs_threshold: 4, ..ChoiceConfig::default() };
    let mut choice = over(config, &[A, B]);
    let held: Vec<Chosen> =
        (0..5).map(|_| choice.choose(NOW, &turns(1, 50), &[A]).unwrap()).collect();
    let next = choice.choose(NOW, &turns(1, 50), &[A, B]).unwrap();
    assert_eq!(next.worker, B, "A is five ahead");
    drop(held);
}

#[test]
fn a_short_common_beginning_does_not_count() {
    let system = "s".repeat(2 * BLOCK_BYTES);
    let with =
        |n: usize| prompt(&json!({"system": system, "prompt": n.to_string().repeat(20_000)}));
    let mut choice = over(ChoiceConfig::default(), &[A, B]);
    let homes: Vec<WorkerId> = (10..20)
        .map(|n| {
            let chosen = choice.choose(NOW, &with(n), &[A, B]).unwrap();
            let worker = chosen.worker;
            choice.handle_ended(chosen);
            worker
        })
        .collect();
    assert_eq!(homes.iter().filter(|&&home| home == A).count(), 5, "{homes:?}");
}

#[test]
fn a_dead_workers_entries_go() {
    let mut choice = over(ChoiceConfig::default(), &[A, B]);
    let chosen = choice.choose(NOW, &turns(1, 8), &[A]).unwrap();
    assert!(choice.remembered(A) >= 8);
    choice.handle_lost(A);
    assert_eq!(choice.remembered(A), 0);
    assert!(choice.uncached_under_way(A) >= 8, "its requests have not ended");
    choice.handle_left(A);
    choice.handle_ended(chosen);
    assert_eq!(choice.uncached_under_way(A), 0);
    assert_eq!(choice.choose(NOW, &turns(1, 8), &[A]), None, "it is known no more");
    assert_eq!(choice.choose(NOW, &turns(1, 8), &[A, B]).unwrap().worker, B);
}

#[test]
fn what_was_refused_is_not_believed_to_be_there() {
    let mut choice = over(ChoiceConfig::default(), &[A, B]);
    let first = choice.choose(NOW, &turns(1, 4), &[A]).unwrap();
    choice.handle_ended(first);
    let before = choice.remembered(A);
    let refused = choice.choose(NOW, &turns(1, 9), &[A]).unwrap();
    choice.handle_refused(&refused, &turns(1, 9));
    choice.handle_ended(refused);
    assert_eq!(choice.remembered(A), before);
}

#[test]
fn what_was_sent_long_ago_does_not_count() {
    let mut choice = over(ChoiceConfig::default(), &[A, B]);
    let ttl = ChoiceConfig::default().ttl;
    let first = choice.choose(NOW, &turns(1, 4), &[A]).unwrap();
    choice.handle_ended(first);
    let overlap = |choice: &mut Choice, at| {
        let chosen = choice.choose(at, &turns(1, 4), &[A]).unwrap();
        let overlap = chosen.overlap_blocks;
        choice.handle_ended(chosen);
        overlap
    };
    let later = NOW + ttl - Duration::from_millis(1);
    assert!(overlap(&mut choice, later) >= 4, "and it is fresh again");
    assert!(overlap(&mut choice, NOW + ttl) >= 4);
    assert_eq!(overlap(&mut choice, NOW + ttl + ttl), 0);
}

#[test]
fn the_other_policies_look_at_no_prompt() {
    let of = |policy| over(ChoiceConfig { policy, ..ChoiceConfig::default() }, &[A, B, C]);
    let mut turn = of(Policy::RoundRobin);
    let picks: Vec<_> =
        (0..6).map(|_| turn.choose(NOW, &turns(1, 8), &[A, B, C]).unwrap().worker).collect();
    assert_eq!(picks, [A, B, C, A, B, C]);
    let mut load = of(Policy::LeastLoad);
    let held = load.choose(NOW, &turns(1, 8), &[A]).unwrap();
    let next = load.choose(NOW, &turns(1, 8), &[A, B]).unwrap();
    assert_eq!(next.worker, B);
    load.handle_ended(held);
    assert_eq!(load.choose(NOW, &turns(1, 8), &[A, B]).unwrap().worker, A);
    assert_eq!(load.remembered(A) + turn.remembered(A), 0);
    assert_eq!(load.choose(NOW, &turns(1, 8), &[]), None);
}

/// An oracle for the index: a list of hashes, the least recently sent first.
fn sent(list: &mut VecDeque<(u64, Duration)>, chain: &[u64], now: Duration, max: usize) {
    for &hash in chain.iter().take(max).rev() {
        list.retain(|(known, _)| *known != hash);
        list.push_back((hash, now));
    }
    while list.len() > max {
        list.pop_front();
    }
}

proptest! {
    #[test]
    fn the_index_is_a_bounded_list_of_the_last_sent(
        max in 1_usize..12,
        steps in prop::collection::vec((0_u64..4, 1_usize..9, 0_u64..4), 1..60),
    ) {
        let ttl = Duration::from_secs(10);
        let mut index = Index::new(max);
        let mut list = VecDeque::new();
        let mut now = Duration::ZERO;
        for (session, length, pause) in steps {
            now += Duration::from_secs(pause);
            let chain: Vec<u64> = (0..length as u64).map(|n| session * 100 + n).collect();
            index.insert(&chain, now, ttl);
            sent(&mut list, &chain, now, max);
            prop_assert!(index.len() <= max);
            prop_assert!(index.touches() <= 2 * max);
            for session in 0..4 {
                let whole: Vec<u64> = (0..9).map(|n| session * 100 + n).collect();
                let fresh = |hash: &&u64| {
                    list.iter().any(|(known, at)| known == *hash && now - *at < ttl)
                };
                let expected = whole.iter().take_while(fresh).count();
                prop_assert_eq!(index.overlap(&whole, now, ttl) as usize, expected);
            }
        }
    }

    #[test]
    fn counts_return_to_zero_and_the_cheapest_is_chosen(
        steps in prop::collection::vec((0_usize..6, 1_usize..6, 0_usize..4), 1..80),
    ) {
        let mut choice = over(ChoiceConfig { blocks_max: 20, ..ChoiceConfig::default() }, &[A, B, C]);
        let mut held = Vec::new();
        for (session, count, action) in steps {
            let prompt = turns(session, count);
            let rated = choice.rate(NOW, &prompt, &[A, B, C]);
            let chosen = choice.choose(NOW, &prompt, &[A, B, C]).unwrap();
            let cost = |id| rated.iter().find(|(_, known, _)| *known == id).unwrap().0;
            prop_assert!([A, B, C].into_iter().all(|other| cost(chosen.worker) <= cost(other)));
            prop_assert!(chosen.overlap_blocks <= chosen.prompt_blocks);
            held.push(chosen);
            match action {
                0 => choice.handle_ended(held.swap_remove(held.len() / 2)),
                1 => choice.handle_first_token(held.last_mut().unwrap()),
                2 => choice.handle_lost(A),
                _ => {}
            }
            for worker in [A, B, C] {
                prop_assert!(choice.remembered(worker) <= 20);
            }
        }
        held.into_iter().for_each(|chosen| choice.handle_ended(chosen));
        for worker in [A, B, C] {
            prop_assert_eq!(choice.uncached_under_way(worker), 0);
            prop_assert_eq!(choice.workers[&worker].active, 0);
        }
    }
}
