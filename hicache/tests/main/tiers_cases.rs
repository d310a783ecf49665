//! The tiers in single cases.

use crate::tiers::small_limits;
use hicache::tiers::{
    Action, FetchEnd, FetchId, MotionId, Move, Outcome, Store, StoreLimits, Tier, Tiers,
};
use hicache::{Change, ObjectKey};
use kv_pool::ChainHash;

fn key_of(number: u8) -> ObjectKey {
    ObjectKey::block(ChainHash([number; 32]))
}

/// Tiers with a store that others write too, and nothing known of it.
fn tiers_of_others() -> Tiers {
    let mut limits = small_limits();
    let remote = StoreLimits { bytes_max: None, objects_max: 12, motions_max: 2, owned: false };
    (limits.disk, limits.remote) = (None, Some(remote));
    Tiers::new(limits)
}

fn begun(tiers: &mut Tiers) -> Vec<(MotionId, Move)> {
    let action = |action| match action {
        Action::Begin { motion, what } => (motion, what),
        Action::Fetched { .. } => panic!("nothing is fetched"),
    };
    std::iter::from_fn(|| tiers.poll_action()).map(action).collect()
}

#[test]
fn what_others_wrote_can_be_had_after_a_probe_and_what_is_missing_stays_so() {
    let mut tiers = tiers_of_others();
    let store = Store::Remote;
    let [there, missing] = [key_of(1), key_of(2)];
    tiers.probe(0, [there, missing, there]);
    let motions = begun(&mut tiers);
    let what = [there, missing].map(|key| Move::Probe { store, key });
    assert_eq!(motions.iter().map(|(_, what)| *what).collect::<Vec<_>>(), what);
    assert_eq!(tiers.holds(&there), None, "nothing is known yet");
    tiers.handle_done(1, motions[0].0, Outcome::Done).expect("under way");
    tiers.handle_done(1, motions[1].0, Outcome::Missing).expect("under way");
    assert_eq!((tiers.holds(&there), tiers.holds(&missing)), (Some(Tier::Remote), None));
    tiers.probe(2, [there]);
    assert_eq!(begun(&mut tiers), [], "what is known is not looked for");
    let counters = tiers.counters(Tier::Remote);
    assert_eq!((counters.probes, counters.probes_found, counters.probes_dropped), (2, 1, 0));
}

#[test]
fn probes_have_a_bound_and_failed_ones_pause_their_store() {
    let mut tiers = tiers_of_others();
    tiers.probe(0, (0..9).map(key_of));
    assert_eq!((tiers.probes(), tiers.counters(Tier::Remote).probes_dropped), (5, 4));
    let mut ended = 0;
    while let [(motion, _), ..] = begun(&mut tiers)[..] {
        // The second one that has begun ends last, and does not matter here.
        tiers.handle_done(1, motion, Outcome::Failed).expect("under way");
        ended += 1;
    }
    let counters = tiers.counters(Tier::Remote);
    assert_eq!((ended, counters.failures, counters.pauses), (3, 3, 1), "{counters:?}");
    tiers.probe(2, [key_of(20)]);
    assert_eq!(begun(&mut tiers), [], "the store is left alone");
    tiers.handle_timeout(1000);
    tiers.probe(1000, [key_of(20)]);
    assert_eq!(begun(&mut tiers).len(), 1, "and not for ever");
}

#[test]
fn wrong_bytes_are_not_found_again_by_a_probe() {
    let mut tiers = tiers_of_others();
    let key = key_of(1);
    assert!(tiers.adopt(Store::Remote, key));
    tiers.prefetch(0, [key]);
    let motions = begun(&mut tiers);
    tiers.handle_done(1, motions[0].0, Outcome::Mismatch).expect("under way");
    tiers.probe(2, [key]);
    assert_eq!((begun(&mut tiers), tiers.holds(&key)), (vec![], None));
    // Its own write makes it right again.
    let (save, slot) = tiers.offer(3, key).expect("a slot");
    tiers.handle_done(4, save, Outcome::Done).expect("under way");
    let motions = begun(&mut tiers);
    assert_eq!(motions[0].1, Move::Write { store: Store::Remote, key, slot });
    tiers.handle_done(5, motions[0].0, Outcome::Done).expect("under way");
    assert_eq!(tiers.evict(Store::Remote, 1), 1);
    tiers.flush_host();
    tiers.probe(6, [key]);
    assert_eq!(begun(&mut tiers).len(), 1);
}

/// Tiers with four slots for blocks and a disk, and one object saved into each slot.
fn full_tiers() -> Tiers {
    let mut limits = small_limits();
    let disk =
        StoreLimits { bytes_max: Some(10_000), objects_max: 30, motions_max: 1, owned: true };
    (limits.disk, limits.remote) = (Some(disk), None);
    (limits.host_blocks, limits.pins_max) = (4, [9, 9]);
    let mut tiers = Tiers::new(limits);
    for number in 0..4 {
        let (save, _) = tiers.offer(0, key_of(number)).expect("a slot");
        tiers.handle_done(0, save, Outcome::Done).expect("under way");
    }
    tiers
}

#[test]
fn pinned_objects_stay_until_their_time_and_leave_half_of_the_room() {
    let mut limits = *full_tiers().limits();
    limits.disk = None;
    let mut tiers = Tiers::new(limits);
    assert!(tiers.pin(0, key_of(0), 1000), "it may come later");
    let pins = [(1, 500), (1, 2000), (2, 1000), (3, 100)];
    let save = |tiers: &mut Tiers, now: u64, number: u8| {
        let (save, _) = tiers.offer(now, key_of(number)).expect("a slot");
        tiers.handle_done(now, save, Outcome::Done).expect("under way");
    };
    (0..4).for_each(|number| save(&mut tiers, 0, number));
    let pinned = pins.map(|(number, until)| tiers.pin(0, key_of(number), until));
    assert_eq!(pinned, [true, true, false, false], "half of four may be pinned");
    assert_eq!((tiers.pins(), tiers.counters(Tier::Host).pins_refused), ([2, 0], 2));
    (4..9).for_each(|number| save(&mut tiers, 10, number));
    let held = |tiers: &Tiers, number| tiers.in_host(&key_of(number));
    assert!(held(&tiers, 0) && held(&tiers, 1) && !held(&tiers, 2));
    assert_eq!(tiers.poll_timeout(), Some(1000));
    tiers.handle_timeout(1000);
    (10..13).for_each(|number| save(&mut tiers, 1001, number));
    assert!(!held(&tiers, 0) && held(&tiers, 1), "one pin was over, the other made longer");
    tiers.flush_host();
    assert_eq!((tiers.pins(), held(&tiers, 1), tiers.poll_timeout()), ([0, 0], false, None));
}

#[test]
fn a_pin_of_what_never_comes_is_over_after_ten_minutes() {
    const WAIT_US: u64 = 600_000_000;
    let mut limits = *full_tiers().limits();
    limits.disk = None;
    let mut tiers = Tiers::new(limits);
    assert!(tiers.pin(5, key_of(0), u64::MAX) && tiers.pin(5, key_of(1), u64::MAX));
    assert!(!tiers.pin(5, key_of(2), 1000), "half of four may be pinned");
    let (save, _) = tiers.offer(6, key_of(1)).expect("a slot");
    tiers.handle_done(7, save, Outcome::Done).expect("under way");
    assert_eq!(tiers.poll_timeout(), Some(WAIT_US + 5));
    tiers.handle_timeout(WAIT_US + 4);
    assert_eq!(tiers.pins(), [2, 0]);
    tiers.handle_timeout(WAIT_US + 5);
    assert_eq!((tiers.pins(), tiers.poll_timeout()), ([1, 0], None), "what came stays for ever");
    assert!(tiers.pin(WAIT_US + 6, key_of(2), WAIT_US + 7), "there is room again");
    assert_eq!(tiers.poll_timeout(), Some(WAIT_US + 7), "none waits longer than was wished");
}

#[test]
fn what_is_found_with_another_length_is_not_taken_for_the_object() {
    let mut tiers = tiers_of_others();
    tiers.probe(0, [key_of(1)]);
    let motions = begun(&mut tiers);
    tiers.handle_done(1, motions[0].0, Outcome::Mismatch).expect("under way");
    let counters = tiers.counters(Tier::Remote);
    assert_eq!((tiers.holds(&key_of(1)), counters.mismatches, counters.failures), (None, 1, 0));
    tiers.probe(2, [key_of(1)]);
    assert_eq!(begun(&mut tiers), [], "it is not looked for again");
    assert!(!tiers.is_paused(Store::Remote));
}

/// One write at a time, and as many saves as there are slots: a quarter of them waits for its turn
/// and is written, whatever else comes.
#[test]
fn what_waits_to_be_written_is_not_driven_out() {
    let mut tiers = full_tiers();
    let writes = |tiers: &mut Tiers| {
        let written = |what: &Move| matches!(what, Move::Write { .. });
        begun(tiers).into_iter().filter(|(_, what)| written(what)).collect::<Vec<_>>()
    };
    let first = writes(&mut tiers);
    assert_eq!(first.len(), 1);
    for number in 10..14 {
        let Some((save, _)) = tiers.offer(1, key_of(number)) else { continue };
        tiers.handle_done(1, save, Outcome::Done).expect("under way");
    }
    // Of the first four, one is being written and one is held; the other two had to go.
    let here = (0..4).filter(|number| tiers.in_host(&key_of(*number))).collect::<Vec<_>>();
    assert_eq!(here, [0, 1]);
    let mut under_way = first;
    while let Some((motion, _)) = under_way.pop() {
        tiers.handle_done(2, motion, Outcome::Done).expect("under way");
        under_way.extend(writes(&mut tiers));
    }
    assert_eq!(tiers.backlog(), [0, 0, 0]);
    tiers.flush_host();
    let stored = (0..4).filter(|number| tiers.holds(&key_of(*number)) == Some(Tier::Disk));
    assert_eq!(stored.collect::<Vec<_>>(), [0, 1]);
}

/// Whatever was under way when a store was emptied is not there afterwards.
#[test]
fn emptied_store_keeps_nothing_of_what_was_under_way() {
    let mut tiers = full_tiers();
    let [(first, Move::Write { key, .. })] = begun(&mut tiers)[..] else {
        panic!("one is written")
    };
    tiers.flush_host();
    tiers.want_empty(Store::Disk);
    assert_eq!((tiers.evict(Store::Disk, 9), tiers.backlog()), (0, [0, 0, 0]));
    tiers.handle_done(1, first, Outcome::Done).expect("under way");
    let [(gone, what)] = begun(&mut tiers)[..] else { panic!("it is removed") };
    assert_eq!((what, tiers.holds(&key)), (Move::Remove { store: Store::Disk, key }, None));
    tiers.handle_done(2, gone, Outcome::Done).expect("under way");
    assert_eq!(tiers.used(Tier::Disk).map(|used| used.objects), Some([0, 0]));
    // What comes later is stored as always.
    let (save, _) = tiers.offer(3, key).expect("a slot");
    tiers.handle_done(3, save, Outcome::Done).expect("under way");
    let [(write, Move::Write { .. })] = begun(&mut tiers)[..] else { panic!("it is written") };
    tiers.handle_done(4, write, Outcome::Done).expect("under way");
    tiers.flush_host();
    assert_eq!(tiers.holds(&key), Some(Tier::Disk));
}

#[test]
fn changes_wait_up_to_their_bound_and_the_rest_is_counted() {
    let mut tiers = tiers_of_others();
    let save = |tiers: &mut Tiers, number| {
        let (motion, _) = tiers.offer(0, key_of(number)).expect("a slot");
        tiers.handle_done(0, motion, Outcome::Done).expect("under way");
    };
    save(&mut tiers, 1);
    assert_eq!((tiers.poll_change(), tiers.changes_lost()), (None, 0), "nobody follows");
    tiers.report_changes(2);
    for number in 2..5 {
        save(&mut tiers, number);
    }
    assert_eq!(tiers.changes_lost(), 1);
    let told: Vec<_> = std::iter::from_fn(|| tiers.poll_change()).collect();
    let came = |number| (Tier::Host, Change::Arrived(key_of(number)));
    assert_eq!(told, [came(2), came(3)]);
    assert!((1..5).all(|number| tiers.is_in(Tier::Host, &key_of(number))));
    tiers.flush_host();
    assert_eq!((std::iter::from_fn(|| tiers.poll_change()).count(), tiers.changes_lost()), (2, 3));
}

/// Reads the only object of the disk, and says how that ended.
fn read_one(tiers: &mut Tiers, now: u64, outcome: Outcome) {
    tiers.prefetch(now, [key_of(0)]);
    let [(read, Move::Read { .. })] = begun(tiers)[..] else { panic!("it is read") };
    tiers.handle_done(now, read, outcome).expect("under way");
}

/// Tiers whose disk has one object, and whose host has none.
fn tiers_of_one() -> Tiers {
    let mut limits = *full_tiers().limits();
    limits.host_blocks = 4;
    let mut tiers = Tiers::new(limits);
    assert!(tiers.adopt(Store::Disk, key_of(0)));
    tiers
}

#[test]
fn object_that_could_not_be_read_stays_and_is_found_again_later() {
    let mut tiers = tiers_of_one();
    read_one(&mut tiers, 0, Outcome::Failed);
    assert_eq!((begun(&mut tiers), tiers.holds(&key_of(0))), (vec![], None), "nothing is removed");
    let due = tiers.poll_timeout().expect("it is found again some time");
    tiers.handle_timeout(due);
    assert_eq!(tiers.holds(&key_of(0)), Some(Tier::Disk));
    // Wrong bytes are another thing.
    read_one(&mut tiers, due, Outcome::Mismatch);
    let gone = Move::Remove { store: Store::Disk, key: key_of(0) };
    assert_eq!(begun(&mut tiers).iter().map(|(_, what)| *what).collect::<Vec<_>>(), [gone]);
}

#[test]
fn what_cannot_be_removed_is_tried_less_and_less_and_does_not_speak_for_its_store() {
    let mut tiers = tiers_of_one();
    let pause = tiers.limits().pause_us;
    read_one(&mut tiers, 0, Outcome::Mismatch);
    let (mut now, mut gaps) = (0, Vec::new());
    for round in 0..9 {
        let [(removal, Move::Remove { key, .. })] = begun(&mut tiers)[..] else {
            panic!("it is removed, round {round}")
        };
        tiers.handle_done(now, removal, Outcome::Failed).expect("under way");
        assert_eq!(tiers.holds(&key), None, "wrong bytes are never found again");
        assert!(!tiers.is_paused(Store::Disk), "round {round}");
        let next = tiers.poll_timeout().expect("it is tried again");
        gaps.push((next - now) / pause);
        now = next;
        tiers.handle_timeout(now);
    }
    assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
    let disk = tiers.counters(Tier::Disk);
    assert_eq!((disk.failures, disk.pauses, disk.evicted), (9, 0, 0), "{disk:?}");
    let [(removal, _)] = begun(&mut tiers)[..] else { panic!("it is removed") };
    tiers.handle_done(now, removal, Outcome::Done).expect("under way");
    assert_eq!(tiers.used(Tier::Disk).map(|used| used.bytes), Some(0));
}

/// What was only in the way and could not be removed is as good as before.
#[test]
fn failed_eviction_leaves_the_object_and_pauses_the_store() {
    let mut limits = *full_tiers().limits();
    limits.disk = limits.disk.map(|disk| StoreLimits { bytes_max: Some(30), ..disk });
    let mut tiers = Tiers::new(limits);
    (0..3).for_each(|number| assert!(tiers.adopt(Store::Disk, key_of(number))));
    let (save, _) = tiers.offer(0, key_of(9)).expect("a slot");
    tiers.handle_done(0, save, Outcome::Done).expect("under way");
    let mut failed = 0;
    while let [(removal, Move::Remove { .. })] = begun(&mut tiers)[..] {
        tiers.handle_done(1, removal, Outcome::Failed).expect("under way");
        failed += 1;
    }
    let disk = tiers.counters(Tier::Disk);
    assert_eq!((failed, disk.pauses, disk.evicted, disk.dropped), (3, 1, 0, 1), "{disk:?}");
    tiers.handle_timeout(tiers.poll_timeout().expect("the pause ends"));
    let there = (0..3).filter(|number| tiers.holds(&key_of(*number)) == Some(Tier::Disk));
    assert_eq!(there.count(), 3, "all are still there");
}

#[test]
fn store_that_is_too_slow_for_fetches_is_left_alone() {
    let mut tiers = tiers_of_one();
    let mut now = 0;
    for round in 0..3 {
        assert_eq!(tiers.holds(&key_of(0)), Some(Tier::Disk), "round {round}");
        tiers.fetch(now, FetchId(round), &[key_of(0)], now + 100).expect("it can begin");
        let [(read, Move::Read { .. })] = begun(&mut tiers)[..] else { panic!("it is read") };
        now += 100;
        tiers.handle_timeout(now);
        let late = Action::Fetched { fetch: FetchId(round), end: FetchEnd::TimedOut };
        assert_eq!(tiers.poll_action(), Some(late));
        // It comes in the end, and has been forgotten by the host before somebody asks again.
        tiers.handle_done(now + 50, read, Outcome::Done).expect("under way");
        tiers.flush_host();
    }
    let disk = tiers.counters(Tier::Disk);
    assert_eq!((disk.late, disk.pauses, tiers.holds(&key_of(0))), (3, 1, None), "{disk:?}");
}

/// One read that never ends keeps others from beginning, and that is the store's fault as well.
#[test]
fn store_that_never_answers_is_left_alone() {
    let mut tiers = tiers_of_one();
    (1..4).for_each(|number| assert!(tiers.adopt(Store::Disk, key_of(number))));
    for round in 0..3 {
        let now = 100 * round;
        let fetch = FetchId(round);
        tiers.fetch(now, fetch, &[key_of(round as u8)], now + 100).expect("it can begin");
        assert_eq!(begun(&mut tiers).len(), usize::from(round == 0), "one at a time");
        tiers.handle_timeout(now + 100);
        let late = Action::Fetched { fetch, end: FetchEnd::TimedOut };
        assert_eq!(tiers.poll_action(), Some(late));
    }
    let disk = tiers.counters(Tier::Disk);
    assert_eq!((disk.late, disk.pauses, tiers.holds(&key_of(3))), (3, 1, None), "{disk:?}");
}

#[test]
fn store_that_holds_too_much_is_trimmed() {
    let mut limits = *full_tiers().limits();
    limits.disk = limits.disk.map(|disk| StoreLimits { bytes_max: Some(20), ..disk });
    let mut tiers = Tiers::new(limits);
    (0..5).for_each(|number| assert!(tiers.adopt(Store::Disk, key_of(number))));
    tiers.trim(Store::Disk, 9);
    let gone: Vec<Move> = begun(&mut tiers).into_iter().map(|(_, what)| what).collect();
    let removed = [0, 1, 2].map(|number| Move::Remove { store: Store::Disk, key: key_of(number) });
    assert_eq!(gone, removed, "those used longest ago");
}

/// Tiers with a folder and nothing in them.
fn tiers_with_folder() -> Tiers {
    let mut limits = small_limits();
    let disk = StoreLimits { bytes_max: None, objects_max: 12, motions_max: 2, owned: true };
    (limits.disk, limits.remote) = (Some(disk), None);
    Tiers::new(limits)
}

/// The same with an object in host memory and in the folder.
fn stored(key: ObjectKey) -> Tiers {
    let mut tiers = tiers_with_folder();
    let (motion, _) = tiers.offer(0, key).expect("there is room");
    tiers.handle_done(1, motion, Outcome::Done).expect("under way");
    for (motion, what) in begun(&mut tiers) {
        assert!(matches!(what, Move::Write { .. }), "{what:?}");
        tiers.handle_done(2, motion, Outcome::Done).expect("under way");
    }
    assert!(tiers.host_slot(&key).is_some() && tiers.is_in(Tier::Disk, &key));
    assert_eq!(tiers.host_objects().collect::<Vec<_>>(), [key]);
    tiers
}

#[test]
fn a_wrong_object_in_host_memory_goes_there_and_its_file_stays() {
    let key = key_of(1);
    let mut tiers = stored(key);
    tiers.found_wrong(&key);
    assert_eq!((tiers.host_slot(&key), tiers.holds(&key)), (None, Some(Tier::Disk)));
    assert_eq!(tiers.counters(Tier::Host).mismatches, 1);
    tiers.found_wrong(&key);
    assert_eq!(tiers.counters(Tier::Host).mismatches, 1, "it is gone");
}

#[test]
fn what_was_made_of_wrong_bytes_goes_from_every_tier() {
    let key = key_of(1);
    let mut tiers = stored(key);
    tiers.give_up(key);
    assert_eq!((tiers.host_slot(&key), tiers.holds(&key)), (None, None));
    let motions = begun(&mut tiers);
    let what: Vec<Move> = motions.iter().map(|(_, what)| *what).collect();
    assert_eq!(what, [Move::Remove { store: Store::Disk, key }]);
    tiers.handle_done(3, motions[0].0, Outcome::Done).expect("under way");
    assert!(tiers.offer(4, key).is_some(), "it can be made again");
}

#[test]
fn what_is_being_written_is_removed_when_that_has_ended() {
    let key = key_of(1);
    let mut tiers = tiers_with_folder();
    let (motion, _) = tiers.offer(0, key).expect("there is room");
    tiers.handle_done(1, motion, Outcome::Done).expect("under way");
    let writing = begun(&mut tiers);
    tiers.give_up(key);
    assert_eq!(begun(&mut tiers), [], "a file is not removed while it is written");
    let [(motion, Move::Write { .. })] = writing[..] else { panic!("{writing:?}") };
    tiers.handle_done(2, motion, Outcome::Done).expect("under way");
    let what: Vec<Move> = begun(&mut tiers).iter().map(|(_, what)| *what).collect();
    assert_eq!(what, [Move::Remove { store: Store::Disk, key }]);
    assert_eq!(tiers.holds(&key), None);
}
