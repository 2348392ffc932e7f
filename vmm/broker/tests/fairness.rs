//! How tenants share a link, in time that only the tests move: several ledgers over one page, and drawers that come when they are told to.
#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "tests")]

use std::collections::VecDeque;
use std::time::Duration;

use hw_engine::{Booking, Crossing, Direction, LinkId, LinkLedger};
use proptest::prelude::*;
use vmm_broker::LinkTable;

const LINK: LinkId = LinkId(0);
/// Two bytes a nanosecond.
const BANDWIDTH: u64 = 2_000_000_000;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000_000;
/// The clock does not begin at 0.
const START: u64 = 5_000 * MILLI;

/// A transfer on its way.
#[derive(Clone, Copy, Debug)]
struct Job {
    left: u64,
    ready: u64,
    since: u64,
}

/// What a tenant does: it keeps `depth` transfers on their way, of these sizes in turn, and moves them a piece at a time each.
#[derive(Clone, Debug)]
struct Habit {
    weight: u32,
    depth: usize,
    sizes: Vec<u64>,
    /// Between the end of a transfer and the next one.
    pause: u64,
    /// By how much it comes late, at most.
    late: u64,
    /// When it begins.
    from: u64,
}

impl Habit {
    fn flood(sizes: &[u64]) -> Self {
        Self { weight: 100, depth: 64, sizes: sizes.into(), pause: 0, late: 0, from: 0 }
    }
}

struct Tenant {
    table: LinkTable,
    habit: Habit,
    jobs: VecDeque<Job>,
    turn: usize,
    next: u64,
    noise: u64,
    /// Bytes that were through by the end of the run.
    moved: u64,
    /// When each piece was through, and its bytes.
    pieces: Vec<(u64, u64)>,
    /// How long each transfer took.
    took: Vec<u64>,
}

impl Tenant {
    fn size(&mut self) -> u64 {
        self.turn += 1;
        self.habit.sizes[self.turn % self.habit.sizes.len()]
    }

    fn lateness(&mut self) -> u64 {
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if self.habit.late == 0 { 0 } else { (self.noise >> 33) % self.habit.late }
    }

    /// Books all it may now, and says when it comes again.
    fn act(&mut self, now: u64, end: u64) {
        self.next = loop {
            let Some(at) = self.jobs.iter().position(|job| job.ready <= now) else {
                break self.jobs.iter().map(|job| job.ready).min().unwrap();
            };
            let mut job = self.jobs.remove(at).unwrap();
            let bytes = job.left.min(self.table.piece(LINK).unwrap());
            let more = job.left > bytes || self.jobs.iter().any(|job| job.ready <= now);
            let crossing = Crossing { link: LINK, direction: Direction::Out, bytes, more };
            let times = (Duration::from_nanos(job.ready), Duration::from_nanos(now));
            match self.table.reserve(&[crossing], times.0, times.1) {
                Booking::Later(at) => {
                    self.jobs.push_front(job);
                    let at = u64::try_from(at.as_nanos()).unwrap();
                    assert!(at > now, "later is later");
                    break at;
                }
                Booking::Through(through) => {
                    let through = u64::try_from(through.as_nanos()).unwrap();
                    job.left -= bytes;
                    self.pieces.push((through, bytes));
                    if through <= end {
                        self.moved += bytes;
                    }
                    if job.left == 0 {
                        self.took.push(through - job.since);
                        let ready = through + self.habit.pause;
                        job = Job { left: self.size(), ready, since: ready };
                    }
                    self.jobs.push_back(job);
                }
            }
        };
        self.next += self.lateness();
    }
}

/// Lets them all loose for some time.
fn run(habits: &[Habit], time: u64) -> Vec<Tenant> {
    let first = LinkTable::create(&[BANDWIDTH]).unwrap();
    let end = START + time;
    let mut tenants = Vec::new();
    for (place, habit) in (0..).zip(habits) {
        let table = LinkTable::open(first.page().try_clone_to_owned().unwrap(), &[BANDWIDTH], place).unwrap();
        table.set_weight(Some(habit.weight));
        let (jobs, turn, next) = (VecDeque::new(), usize::from(place), START + habit.from);
        let (pieces, took, noise) = (Vec::new(), Vec::new(), place.into());
        let mut tenant = Tenant { table, habit: habit.clone(), jobs, turn, next, noise, moved: 0, pieces, took };
        for _ in 0..habit.depth {
            let left = tenant.size();
            tenant.jobs.push_back(Job { left, ready: next, since: next });
        }
        tenants.push(tenant);
    }
    loop {
        let tenant = tenants.iter_mut().min_by_key(|tenant| tenant.next).unwrap();
        let now = tenant.next;
        if now > end {
            return tenants;
        }
        tenant.act(now, end);
    }
}

fn moved(tenants: &[Tenant]) -> Vec<u64> {
    tenants.iter().map(|tenant| tenant.moved).collect()
}

/// 1 if all are equal, 1/n if one has everything.
fn jain(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|share| *share as f64).sum();
    let squares: f64 = shares.iter().map(|share| (*share as f64).powi(2)).sum();
    sum * sum / (shares.len() as f64 * squares)
}

fn used(tenants: &[Tenant], time: u64) -> f64 {
    moved(tenants).iter().sum::<u64>() as f64 / (BANDWIDTH as f64 * time as f64 / 1e9)
}

const MIXES: [&[u64]; 4] =
    [&[4 * KIB, 64 * KIB, 4 * MIB], &[4 * KIB], &[4 * MIB], &[64 * KIB, 4 * KIB, 4 * KIB, 4 * MIB, 4 * KIB]];

/// As little as two in ten thousand of the link is lost at the beginning and the end.
const WHOLE: f64 = 0.9995;

#[test]
fn equal_tenants_get_equal_shares_whatever_they_move() {
    for count in [2, 8] {
        for late in [0, 100, 4000] {
            let habits: Vec<_> =
                (0..count).map(|n| Habit { late: late * MICRO, ..Habit::flood(MIXES[n % MIXES.len()]) }).collect();
            let tenants = run(&habits, 100 * MILLI);
            let (fair, used) = (jain(&moved(&tenants)), used(&tenants, 100 * MILLI));
            // Who is very late has had its share only in the long run.
            let (least, whole) = if late < 1000 { (0.999, WHOLE) } else { (0.98, 0.98) };
            assert!(fair > least, "{count} tenants, {late} us late: {fair}");
            assert!(used > whole, "{count} tenants, {late} us late: {used}");
        }
    }
}

#[test]
fn shares_are_as_the_weights() {
    for [one, other] in [[100, 300], [1, 3], [10_000, 2_500], [1, 100]] {
        for late in [0, 20, 100] {
            let flood = Habit::flood(MIXES[0]);
            let habits = [one, other].map(|weight| Habit { weight, late: late * MICRO, ..flood.clone() });
            let tenants = run(&habits, 200 * MILLI);
            let ratio = tenants[1].moved as f64 / tenants[0].moved as f64;
            let wanted = f64::from(other) / f64::from(one);
            assert!((ratio / wanted - 1.0).abs() < 0.05, "{one} to {other}, {late} us late: 1 to {ratio}");
            assert!(used(&tenants, 200 * MILLI) > WHOLE);
        }
    }
}

#[test]
fn a_small_transfer_among_large_ones_waits_for_little() {
    let piece = 64 * KIB * MICRO / 2000;
    for late in [0, 20, 100] {
        let mut habits = vec![Habit { late: late * MICRO, ..Habit::flood(&[4 * MIB]) }; 7];
        // It comes at every phase of the others.
        let small = Habit { depth: 1, pause: 137 * MICRO, from: MILLI, ..Habit::flood(&[4 * KIB]) };
        habits.push(small);
        let tenants = run(&habits, 100 * MILLI);
        let (took, most) = (&tenants[7].took, 50 * MICRO + piece + 4 * KIB * MICRO / 2000);
        assert!(took.len() > 400 && took.iter().all(|took| *took <= most), "{:?} of {most}", took.iter().max());
        assert!(used(&tenants, 100 * MILLI) > WHOLE && jain(&moved(&tenants)[..7]) > 0.999);
    }
}

#[test]
fn who_comes_later_shares_at_once_and_who_goes_leaves_all() {
    let early = Habit::flood(&[MIB]);
    let late = Habit { from: 50 * MILLI, ..early.clone() };
    let tenants = run(&[early.clone(), late], 100 * MILLI);
    let ratio = tenants[0].moved as f64 / tenants[1].moved as f64;
    assert!((2.9..3.1).contains(&ratio), "all of one half and half of the other: {ratio}");
    // The second one wants nothing most of the time.
    let seldom = Habit { depth: 1, pause: 5 * MILLI, ..early.clone() };
    let tenants = run(&[early, seldom], 100 * MILLI);
    assert!(used(&tenants, 100 * MILLI) > WHOLE, "{}", used(&tenants, 100 * MILLI));
}

#[test]
fn one_tenant_has_the_whole_link_however_late_it_comes() {
    for late in [0, 100, 1000] {
        for sizes in MIXES {
            // So much that there is always something left.
            let alone = run(&[Habit { depth: 512, late: late * MICRO, ..Habit::flood(sizes) }], 100 * MILLI);
            let used = used(&alone, 100 * MILLI);
            assert!(used > 0.98, "{sizes:?}, {late} us late: {used}");
        }
    }
}

#[test]
fn a_tenant_that_stands_still_holds_nobody_up() {
    // It asks once and comes back after the end.
    let dead = Habit { late: 1_000_000 * MILLI, ..Habit::flood(&[4 * MIB]) };
    let tenants = run(&[Habit::flood(&[MIB]), dead, Habit::flood(&[MIB])], 100 * MILLI);
    assert!(tenants[1].moved < MIB);
    assert!(used(&tenants, 100 * MILLI) > WHOLE - 0.01, "{}", used(&tenants, 100 * MILLI));
    assert!(jain(&[tenants[0].moved, tenants[2].moved]) > 0.99);
}

/// The most bytes that pieces of a tenant carried within so much time.
fn most_within(tenant: &Tenant, time: u64) -> u64 {
    let mut pieces = tenant.pieces.clone();
    pieces.sort_unstable();
    let (mut first, mut sum, mut most) = (0, 0, 0);
    for (through, bytes) in &pieces {
        sum += bytes;
        while pieces[first].0 + time <= *through {
            sum -= pieces[first].1;
            first += 1;
        }
        most = most.max(sum);
    }
    most
}

#[test]
fn nobody_is_faster_than_the_link_because_another_oversleeps() {
    let window = 100 * MICRO;
    // Of the time before, as much counts as a direction may be idle before it is given to whoever is there.
    let bound = BANDWIDTH * (window + 500 * MICRO) / 1_000_000_000;
    for late in [300 * MICRO, 5 * MILLI, 30 * MILLI] {
        for sizes in [&[4 * KIB] as &[_], &[64 * KIB], &[4 * MIB]] {
            // One comes and goes; the other wants the link and is seldom there to take it.
            for pause in [0, 2 * MILLI, 10 * MILLI] {
                let habits = [Habit { pause, ..Habit::flood(sizes) }, Habit { late, ..Habit::flood(&[4 * MIB]) }];
                let most = most_within(&run(&habits, 200 * MILLI)[0], window);
                assert!(most <= bound, "{sizes:?}, {late} ns late, pause {pause}: {most} of {bound} bytes");
            }
        }
    }
}

fn habit() -> impl Strategy<Value = Habit> {
    let sizes = prop::collection::vec(prop::sample::select(vec![4 * KIB, 64 * KIB, MIB, 4 * MIB]), 1..6);
    (sizes, 1_u32..=1000, 0..100 * MICRO).prop_map(|(sizes, weight, late)| Habit {
        weight,
        late,
        // Always more than is booked.
        depth: 128,
        ..Habit::flood(&sizes)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn shares_of_any_tenants_are_as_their_weights(habits in prop::collection::vec(habit(), 1..8)) {
        let time = 60 * MILLI;
        let tenants = run(&habits, time);
        let used = used(&tenants, time);
        prop_assert!((0.99..=1.0).contains(&used), "{}", used);
        let all: f64 = habits.iter().map(|habit| f64::from(habit.weight)).sum();
        for (tenant, habit) in tenants.iter().zip(&habits) {
            let wanted = BANDWIDTH as f64 * time as f64 / 1e9 * f64::from(habit.weight) / all;
            let (off, bound) = ((tenant.moved as f64 - wanted).abs(), 0.03 * wanted + 8.0 * 65536.0);
            prop_assert!(off < bound, "{:?}: {} of {}", habit, tenant.moved, wanted);
        }
    }
}
