//! What the guest does: machine code for 16-bit real mode, and where everything lies in its memory.
//!
//! Only instructions that every KVM emulates. A program runs once, from [`CODE`] on, with DS = SS = 0 and ES at the window.

/// Where the window begins in the guest.
pub const WINDOW: u64 = 0x8_0000;
/// Its length in bytes.
pub const WINDOW_LEN: usize = 0x1000;

/// The guest's memory begins at 0 and has this many bytes.
pub(crate) const RAM_LEN: usize = 0x1_0000;
/// Where a program begins. The stack grows down from here.
pub(crate) const CODE: u16 = 0x1000;
/// The used index that the guest saw after its interrupt.
pub(crate) const SEEN: u16 = 0x500;
/// Interrupts that the guest has taken.
pub(crate) const INTERRUPTS: u16 = 0x502;

/// Port of the doorbell.
pub(crate) const DOORBELL: u16 = 0x510;
/// Port by which the guest says that it is done.
pub(crate) const DONE: u16 = 0x512;
/// Interrupt line of the completion.
pub(crate) const LINE: u8 = 5;
/// Vector of line 0, as [`RING_AND_WAIT`] sets it.
const VECTORS: u16 = 0x20;
/// Where the vector of the completion lies: offset, then segment.
pub(crate) const VECTOR: u16 = (VECTORS + LINE as u16) * 4;

/// Stores AX into the window at DI.
const STORE: &[u8] = &[
    0x26, 0x89, 0x05, //       mov es:[di], ax
    0xef, //                   out dx, ax           ; done
    0xeb, 0xfe, //             jmp $
];

/// Stores AX, AX + 1, ... into the window at DI, for ever.
const STORE_ON: &[u8] = &[
    0x26, 0x89, 0x05, // next: mov es:[di], ax
    0x40, //                   inc ax
    0xeb, 0xfa, //             jmp next
];

/// Publishes AX as available index at BX and rings the doorbell at DX.
const RING: &[u8] = &[
    0x89, 0x07, //             mov [bx], ax
    0xef, //                   out dx, ax           ; doorbell
    0xba, 0x12, 0x05, //       mov dx, 0x512
    0xef, //                   out dx, ax           ; done
    0xeb, 0xfe, //             jmp $
];

/// The same, then sleeps until the interrupt has come, and keeps the used index at SI as it is then.
const RING_AND_WAIT: &[u8] = &[
    0xfa, //                   cli
    0x89, 0xc1, //             mov cx, ax
    0xb0, 0x11, 0xe6, 0x20, // mov al, 0x11; out 0x20, al  ; interrupt controller: edges, four words follow
    0xb0, 0x20, 0xe6, 0x21, // mov al, 0x20; out 0x21, al  ; vectors from 0x20 on
    0xb0, 0x04, 0xe6, 0x21, // mov al, 0x04; out 0x21, al  ; the second controller is on line 2
    0xb0, 0x01, 0xe6, 0x21, // mov al, 0x01; out 0x21, al  ; 8086 mode
    0xb0, 0xdf, 0xe6, 0x21, // mov al, 0xdf; out 0x21, al  ; line 5 only
    0x89, 0x0f, //             mov [bx], cx
    0xef, //                   out dx, ax           ; doorbell
    0xfa, //             wait: cli
    0x83, 0x3e, 0x02, 0x05, 0x00, // cmp word [0x502], 0
    0x75, 0x04, //             jne came
    0xfb, //                   sti                  ; takes effect after the next instruction,
    0xf4, //                   hlt                  ; so an interrupt cannot come between the two
    0xeb, 0xf4, //             jmp wait
    0x8b, 0x04, //       came: mov ax, [si]
    0xa3, 0x00, 0x05, //       mov [0x500], ax
    0xba, 0x12, 0x05, //       mov dx, 0x512
    0xef, //                   out dx, ax           ; done
    0xeb, 0xfe, //             jmp $
    0xff, 0x06, 0x02, 0x05, // handler: inc word [0x502]
    0x50, //                   push ax
    0xb0, 0x20, 0xe6, 0x20, // mov al, 0x20; out 0x20, al  ; end of interrupt
    0x58, //                   pop ax
    0xcf, //                   iret
];
/// Length of the handler at the end of [`RING_AND_WAIT`].
const HANDLER_LEN: usize = 11;

/// Code and the registers it begins with.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    pub(crate) code: &'static [u8],
    /// Offset of the interrupt's handler, for a program that waits for it.
    pub(crate) handler: Option<u16>,
    pub(crate) ax: u16,
    pub(crate) bx: u16,
    pub(crate) dx: u16,
    pub(crate) si: u16,
    pub(crate) di: u16,
}

impl Program {
    fn new(code: &'static [u8], ax: u16, dx: u16) -> Self {
        Self { code, handler: None, ax, bx: 0, dx, si: 0, di: 0 }
    }

    /// Stores `value` into the window at `offset`, and is done.
    pub fn store(offset: u16, value: u16) -> Self {
        Self { di: offset, ..Self::new(STORE, value, DONE) }
    }

    /// Stores `first`, then the number after it, and so on into the window at `offset`. Never done.
    pub fn store_on(offset: u16, first: u16) -> Self {
        Self { di: offset, ..Self::new(STORE_ON, first, DONE) }
    }

    /// Writes `index` to the available index at `available`, rings the doorbell, and is done.
    pub fn ring(available: u16, index: u16) -> Self {
        Self { bx: available, ..Self::new(RING, index, DOORBELL) }
    }

    /// The same; then waits for the interrupt and reads the used index at `used` before it is done.
    pub fn ring_and_wait(available: u16, index: u16, used: u16) -> Self {
        let handler = CODE + u16::try_from(RING_AND_WAIT.len() - HANDLER_LEN).unwrap_or(0);
        Self { bx: available, si: used, handler: Some(handler), ..Self::new(RING_AND_WAIT, index, DOORBELL) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(code: &[u8], part: &[u8]) -> bool {
        code.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn code_names_the_ports_and_places_that_the_host_looks_at() {
        let [low, high] = DONE.to_le_bytes();
        for code in [RING, RING_AND_WAIT] {
            assert!(holds(code, &[0xba, low, high, 0xef]));
        }
        let [low, high] = SEEN.to_le_bytes();
        assert!(holds(RING_AND_WAIT, &[0xa3, low, high]));
        let [low, high] = INTERRUPTS.to_le_bytes();
        assert!(holds(RING_AND_WAIT, &[0x83, 0x3e, low, high, 0]));
        assert!(RING_AND_WAIT[RING_AND_WAIT.len() - HANDLER_LEN..].starts_with(&[0xff, 0x06, low, high]));
    }

    #[test]
    fn interrupt_controller_is_told_the_line_and_the_vectors() {
        assert!(holds(RING_AND_WAIT, &[0xb0, !(1 << LINE), 0xe6, 0x21]));
        assert!(holds(RING_AND_WAIT, &[0xb0, VECTORS.to_le_bytes()[0], 0xe6, 0x21]));
        assert_eq!(VECTOR, 0x94);
    }

    #[test]
    fn window_and_memory_do_not_meet() {
        assert!(RAM_LEN as u64 <= WINDOW);
        assert!(WINDOW.is_multiple_of(16) && WINDOW >> 4 <= u64::from(u16::MAX), "a segment reaches it");
    }
}
