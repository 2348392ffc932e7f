//! Mappings that are kept for the next command.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hw_engine::Place;
use hw_engine::conformance::{self, Parts};
use hw_vfio::{Lazy, MapSink, Mapped, Shape, VfioError};
use iommu_addr::{Access, Gpa, Location};

use crate::parts::{COPIER, DISK, Iommu, PAGE, Sink, Trouble, build_over};
use crate::{move_page, own};

fn build_lazy(iommu: &Arc<Iommu>, shape: Shape) -> Parts {
    build_over(Arc::new(lazy(iommu, Lazy::LINGER)), iommu, shape, Trouble::None)
}

fn lazy(iommu: &Arc<Iommu>, linger: Duration) -> Lazy {
    Lazy::new(Arc::new(Sink(Arc::clone(iommu))), linger)
}

/// Keeps what it has, however long a test takes.
struct Tireless(Lazy);

impl MapSink for Tireless {
    fn map(&self, place: &Place, access: Access, mask: u64) -> Result<Mapped, VfioError> {
        self.0.map(place, access, mask)
    }
}

#[test]
fn an_engine_whose_mappings_are_kept_conforms() {
    conformance::run(&|| build_lazy(&Arc::default(), DISK));
    conformance::run(&|| build_lazy(&Arc::default(), COPIER));
}

#[test]
fn what_was_mapped_is_used_again_for_the_same() {
    let iommu = Arc::<Iommu>::default();
    let host = Arc::new(Tireless(lazy(&iommu, Duration::MAX)));
    let parts = build_over(host, &iommu, DISK, Trouble::None);
    let pages = || iommu.0.lock().unwrap().pages.len();
    let granted = || iommu.0.lock().unwrap().granted[1..].to_vec();
    let before = pages();
    let ram = Location::Ram(Gpa(0x2000));
    for job in [1, 3, 5] {
        assert_eq!(move_page(&parts, job, own(0), ram), (4096, Ok(())));
        // The same memory, but what could be read must not be written.
        assert_eq!(move_page(&parts, job + 1, ram, own(512)), (4096, Ok(())));
        assert_eq!(granted(), [Access::READ, Access::WRITE]);
    }
    assert_eq!(pages(), before + 2);
    drop(parts);
    assert_eq!(pages(), 0);
}

#[test]
fn what_was_mapped_goes_when_there_is_nothing_to_do() {
    let iommu = Arc::<Iommu>::default();
    let parts = build_over(Arc::new(lazy(&iommu, Duration::MAX)), &iommu, DISK, Trouble::None);
    let pages = || iommu.0.lock().unwrap().pages.len();
    let before = pages();
    for job in 0..2 {
        assert_eq!(move_page(&parts, job, own(0), Location::Ram(Gpa(0x2000))), (4096, Ok(())));
        let begun = Instant::now();
        while pages() > before {
            assert!(begun.elapsed() < Duration::from_secs(30), "it goes");
            std::thread::yield_now();
        }
    }
}

/// The `n`th of many places of a page each.
fn nth(hold: &Arc<dyn Any + Send + Sync>, n: u64) -> Place {
    Place::new((n + 1) << 20, PAGE, Arc::clone(hold))
}

#[test]
fn only_the_same_pages_of_the_same_memory_are_the_same() {
    let iommu = Arc::<Iommu>::default();
    let lazy = lazy(&iommu, Duration::MAX);
    let (one, other): (Arc<dyn Any + Send + Sync>, Arc<dyn Any + Send + Sync>) = (Arc::new(1), Arc::new(2));
    let map = |place: Place, access, mask| lazy.map(&place, access, mask).map(|mapped| (mapped.first.0, mapped));
    let (page, _) = map(nth(&one, 0), Access::READ, u64::MAX).unwrap();
    let part = Place { address: (1 << 20) + 100, len: 50, ..nth(&one, 0) };
    let (first, used) = map(part.clone(), Access::READ, page + 0xfff).unwrap();
    assert_eq!((first, used.len), (page + 100, 50), "a part of the page is in it");
    assert_ne!(map(part.clone(), Access::READ, u64::MAX).unwrap().0, first, "that one is in use");
    drop(used);
    let differs = |place: &Place, access| map(place.clone(), access, u64::MAX).unwrap().0 / PAGE > first / PAGE + 1;
    let two = Place { len: PAGE, ..part.clone() };
    assert!(differs(&part, Access::WRITE) && differs(&part, Access::RW) && differs(&two, Access::READ));
    assert!(differs(&nth(&other, 0), Access::READ) && differs(&nth(&one, 1), Access::READ));
    let kept = Arc::strong_count(&other);
    lazy.rest();
    assert_eq!((kept, Arc::strong_count(&other)), (2, 1));
    let (page, _) = map(nth(&one, 0), Access::READ, u64::MAX).unwrap();
    assert!(map(nth(&one, 0), Access::READ, page + 0xffe).is_err(), "a function that cannot name its last byte");
}

#[test]
fn no_more_than_so_much_is_kept_and_the_oldest_goes_first_but_nothing_that_is_used() {
    let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
    let most = Lazy::MAX_KEPT as u64;
    // Many small ones, or fewer large ones.
    for (len, most) in [(PAGE, most), (Lazy::MAX_KEPT_BYTES / 8, 8)] {
        let iommu = Arc::<Iommu>::default();
        let lazy = lazy(&iommu, Duration::MAX);
        let place = |n| Place { address: (n + 1) << 32, len, ..nth(&hold, 0) };
        let count = || iommu.0.lock().unwrap().pages.len() as u64 * PAGE / len;
        let used = lazy.map(&place(0), Access::RW, u64::MAX).unwrap();
        for n in 1..=most {
            drop(lazy.map(&place(n), Access::RW, u64::MAX).unwrap());
            assert_eq!(count(), n + 1);
        }
        drop(lazy.map(&place(most + 1), Access::RW, u64::MAX).unwrap());
        assert_eq!(count(), most / 2 + 1);
        assert!(iommu.find(used.first.0, Access::RW).is_some());
        let maps = || iommu.0.lock().unwrap().granted.len();
        let before = maps();
        for n in most / 2 + 2..=most + 1 {
            drop(lazy.map(&place(n), Access::RW, u64::MAX).unwrap());
        }
        assert_eq!(maps(), before);
        drop(lazy.map(&place(most / 2 + 1), Access::RW, u64::MAX).unwrap());
        assert_eq!(maps(), before + 1);
        drop(lazy);
        assert_eq!(count(), 1, "what is used outlives it");
        drop(used);
        assert_eq!(count(), 0);
    }
}

#[test]
fn nothing_is_kept_longer_than_it_may_be() {
    let iommu = Arc::<Iommu>::default();
    let lazy = lazy(&iommu, Duration::ZERO);
    let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
    drop(lazy.map(&nth(&hold, 0), Access::READ, u64::MAX).unwrap());
    assert_eq!(iommu.0.lock().unwrap().pages.len(), 0);
}

#[test]
fn what_is_kept_is_in_nobodys_way() {
    let iommu = Arc::<Iommu>::default();
    iommu.0.lock().unwrap().room = Some(3);
    let lazy = lazy(&iommu, Duration::MAX);
    let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
    for n in 0..10 {
        assert!(lazy.map(&nth(&hold, n), Access::READ, u64::MAX).is_ok(), "{n}");
    }
    let used: Vec<_> = (0..3).map(|n| lazy.map(&nth(&hold, n), Access::READ, u64::MAX).unwrap()).collect();
    assert!(lazy.map(&nth(&hold, 3), Access::READ, u64::MAX).is_err(), "all is in use");
    drop(used);
}
