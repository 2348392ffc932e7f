//! What the debug kernel finds out by itself: memory that nobody points to any more, and locks taken in the wrong order.
//!
//! [`SCRIPT`] replaces hooks of the guest's script, prints lines as those of [`super::driver`], and shows reports on the console. What KASAN, lockdep and
//! their like say at once is in the kernel's log, where the guest's script looks for it on any kernel.
//!
//! Not here: the kernel itself (`kit::debug`).

/// See the module. Busybox's shell; the file descriptor 3 takes results.
pub const SCRIPT: &str = r#"
leaks=/sys/kernel/debug/kmemleak
# An object is one that leaked when it is 5 s old and two scans have found nobody who points to it.
scan() { sleep 6; echo scan > $leaks; echo scan > $leaks; }
leaked() { scan; cat $leaks; echo "test kmemleak-$1 0 $(grep -c '^unreferenced object' $leaks)" >&3; }
before_load() {
    mount -t debugfs debug /sys/kernel/debug
    echo "test kasan-is-on 1 $(dmesg | grep -c 'KernelAddressSanitizer initialized')" >&3
    scan && echo clear > $leaks
    echo "test kmemleak-is-on 0 $?" >&3
}
before_unload() { leaked before-unload; }
after_unload() {
    leaked after-unload
    echo "test lockdep-still-on 1 $(grep debug_locks /proc/lockdep_stats | tr -dc 0-9)" >&3
}
"#;
