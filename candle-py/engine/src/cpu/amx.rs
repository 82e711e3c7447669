//! The tile registers of AMX (Sapphire Rapids and later): whether this process may use them, and their instructions. The
//! compiler knows neither, so that nothing but this file touches the registers.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::tiles::{ROW_BYTES, TILE_COUNT, TILE_ROWS, Tiles};

/// The bits of XCR0 by which the operating system says that it keeps tiles: their configuration and their data.
const XCR0_TILES: u64 = 0b11 << 17;

/// The processor's tile features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TileFeatures {
    /// Tile registers.
    pub(crate) tile: bool,
    /// Products of bfloat16 tiles.
    pub(crate) bf16: bool,
}

impl TileFeatures {
    /// What the processor has and the operating system keeps (CPUID leaves 1, 7, 1DH and 1EH, XCR0).
    pub(crate) fn detected() -> TileFeatures {
        let (leaves, keeps_state) = (__cpuid(0).eax, __cpuid(1).ecx >> 27 & 1 == 1);
        if leaves < 0x1e || !keeps_state || extended_control() & XCR0_TILES != XCR0_TILES {
            return TileFeatures::default();
        }
        let features = __cpuid_count(7, 0).edx;
        let tile = features >> 24 & 1 == 1 && has_full_tiles();
        TileFeatures { tile, bf16: tile && features >> 22 & 1 == 1 }
    }
}

/// Whether palette 1 has eight tiles of 16 rows of 64 bytes, and the product takes all of them.
fn has_full_tiles() -> bool {
    if __cpuid_count(0x1d, 0).eax < 1 {
        return false;
    }
    let (palette, product) = (__cpuid_count(0x1d, 1), __cpuid_count(0x1e, 0));
    let (row_bytes, names, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    let (depth, width) = (product.ebx & 0xff, product.ebx >> 8 & 0xffff);
    row_bytes as usize == ROW_BYTES
        && names as usize >= TILE_COUNT
        && rows as usize == TILE_ROWS
        && depth as usize == ROW_BYTES / 4
        && width as usize == ROW_BYTES
}

/// XCR0.
fn extended_control() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: called where CPUID says that the operating system has turned XGETBV on.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags)) };
    u64::from(high) << 32 | u64::from(low)
}

/// Whether this process may use tiles. The operating system is asked once; its permission holds for all threads, and for
/// processes forked from this one.
pub(super) fn is_permitted() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| TileFeatures::detected().bf16 && ask_permission())
}

/// Asks Linux for the use of tiles (arch_prctl(2), Documentation/arch/x86/xstate.rst). It refuses where a thread's
/// alternate signal stack is too small to hold them, and knows no such request before Linux 5.16.
#[cfg(target_os = "linux")]
fn ask_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: the request takes two numbers and touches no memory of ours; the kernel changes rax, rcx and r11 alone.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// How other systems give permission is not known here.
#[cfg(not(target_os = "linux"))]
fn ask_permission() -> bool {
    false
}

/// What LDTILECFG reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight full tiles.
static FULL_TILES: Configuration = {
    let mut full = Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < TILE_COUNT {
        full.row_bytes[tile] = ROW_BYTES as u16;
        full.rows[tile] = TILE_ROWS as u8;
        tile += 1;
    }
    full
};

/// The configured tiles of this thread. Dropping it releases them: a thread that is not multiplying has no tiles that a
/// context switch would have to keep.
pub(super) struct AmxTiles(PhantomData<*const ()>);

impl Drop for AmxTiles {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the value proves that the processor has tiles.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

// SAFETY of every block below: the value proves that the process may use tiles and that this thread's are configured, for
// it cannot leave the thread; the memory they touch is what each method's contract asks. What a register holds between two
// blocks stays there: they are volatile, hence in order, and no other code of the thread knows the registers.
impl Tiles for AmxTiles {
    #[inline(always)]
    fn begin() -> Self {
        assert!(is_permitted(), "this process has no AMX");
        let tiles = AmxTiles(PhantomData);
        // SAFETY: as above the impl; the configuration is one that CPUID allows.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const FULL_TILES, options(nostack, preserves_flags, readonly)) };
        tiles
    }

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        // SAFETY: as above the impl.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, preserves_flags, nomem)) };
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: as above the impl.
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{from} + {stride}]",
                t = const T,
                from = in(reg) from,
                stride = in(reg) stride,
                options(nostack, preserves_flags, readonly),
            );
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&self, to: *mut f32, stride: usize) {
        // SAFETY: as above the impl.
        unsafe {
            asm!(
                "tilestored [{to} + {stride}], tmm{t}",
                t = const T,
                to = in(reg) to,
                stride = in(reg) stride,
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: as above the impl; the callers' three registers differ, else the processor refuses the instruction.
        unsafe {
            asm!(
                "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nostack, preserves_flags, nomem),
            );
        }
    }
}
