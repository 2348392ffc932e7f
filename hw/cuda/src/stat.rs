//! Temporary.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;
pub struct Stat { pub n: AtomicU64, pub ns: AtomicU64, pub k: AtomicU64 }
impl Stat { pub const fn new() -> Self { Self { n: AtomicU64::new(0), ns: AtomicU64::new(0), k: AtomicU64::new(0) } }
  pub fn time<T>(&self, k: u64, f: impl FnOnce() -> T) -> T { let s = Instant::now(); let t = f(); self.ns.fetch_add(s.elapsed().as_nanos() as u64, Relaxed); self.n.fetch_add(1, Relaxed); self.k.fetch_add(k, Relaxed); t }
  fn take(&self) -> (u64,u64,u64) { (self.n.swap(0,Relaxed), self.ns.swap(0,Relaxed), self.k.swap(0,Relaxed)) } }
pub static COPY: Stat = Stat::new();
pub static BATCH: Stat = Stat::new();
pub static WRITE: Stat = Stat::new();
pub static POLL: Stat = Stat::new();
pub static EMPTY: Stat = Stat::new();
pub static SUBMIT: Stat = Stat::new();
pub static CHECK: Stat = Stat::new();
pub static NOTE: Stat = Stat::new();
pub fn take() -> String {
  let mut s = String::new();
  for (name, stat) in [("submit",&SUBMIT),("copy",&COPY),("batch",&BATCH),("write",&WRITE),("poll",&POLL),("empty",&EMPTY),("check",&CHECK),("note",&NOTE)] {
    let (n,ns,k) = stat.take();
    if n > 0 { s += &format!("{name}: {n} x {:.2} us ({:.1} ms), {:.1} each; ", ns as f64/1e3/n as f64, ns as f64/1e6, k as f64/n as f64); }
  } s }
