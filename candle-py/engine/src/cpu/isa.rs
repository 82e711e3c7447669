//! Instruction sets: which twin of every kernel runs. Chosen once, at load time; holds no kernel itself.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::pack::Storage;

/// An instruction set that the kernels are written for, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust: any processor (and what aarch64 runs).
    Scalar,
    /// AVX2 with FMA and F16C, 8 lanes.
    Avx2,
    /// AVX-512 F/BW/VL/DQ, 16 lanes.
    Avx512,
    /// The same, and AMX-BF16 for the products of weights in bfloat16.
    Amx,
    /// What `Amx` computes, with its tiles in portable Rust and the machine's best vectors: the same products bit for bit, on
    /// any processor, slowly. For tests; never chosen unasked.
    AmxSoftware,
}

impl Isa {
    /// Every instruction set of processors, weakest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The strongest instruction set of the processor this runs on that there is a use for with weights held so. Where
    /// that may be AMX, the operating system is asked for it.
    pub fn detected(storage: Storage) -> Isa {
        let usable = |isa: &Isa| isa.is_for(storage) && isa.available();
        Isa::ALL.into_iter().rev().find(usable).unwrap_or(Isa::Scalar)
    }

    /// The instruction set called `name` ("scalar", "avx2", "avx512", "amx", "amx-software"), whether or not this
    /// processor has it.
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().chain([Isa::AmxSoftware]).find(|isa| isa.name() == name)
    }

    /// The name that `from_name` takes.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::AmxSoftware => "amx-software",
        }
    }

    /// Whether it is meant for weights held so: tiles are for bfloat16 alone.
    pub fn is_for(self, storage: Storage) -> bool {
        storage == Storage::Bfloat16 || !self.has_tiles()
    }

    /// Whether products of bfloat16 weights are made on tiles.
    pub(super) fn has_tiles(self) -> bool {
        matches!(self, Isa::Amx | Isa::AmxSoftware)
    }

    /// The instruction set of all that is not made on tiles.
    pub(super) fn vectors(self) -> Isa {
        match self {
            Isa::Amx => Isa::Avx512,
            Isa::AmxSoftware => Isa::detected(Storage::Float32),
            isa => isa,
        }
    }

    /// Whether the processor this runs on (and its operating system) can execute it.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar | Isa::AmxSoftware => true,
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            Isa::Amx => Isa::Avx512.available() && amx::is_permitted(),
        }
    }

    /// Whether the processor this runs on can execute it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        matches!(self, Isa::Scalar | Isa::AmxSoftware)
    }
}

/// What products of bytes are made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BytePath {
    /// Portable Rust.
    Scalar,
    /// AVX2, whose products of bytes saturate, in four instructions.
    Avx2,
    /// AVX-VNNI: one instruction of 8 lanes.
    AvxVnni,
    /// AVX-512 with VNNI, which the first processors with AVX-512 lack: one instruction of 16 lanes.
    Avx512Vnni,
}

impl BytePath {
    /// Every path, slowest first.
    pub const ALL: [BytePath; 4] = [BytePath::Scalar, BytePath::Avx2, BytePath::AvxVnni, BytePath::Avx512Vnni];

    /// The fastest that this processor has and that needs no wider vectors than `isa`'s.
    pub fn of(isa: Isa) -> BytePath {
        let least = |path: BytePath| match path {
            BytePath::Scalar => Isa::Scalar,
            BytePath::Avx2 | BytePath::AvxVnni => Isa::Avx2,
            BytePath::Avx512Vnni => Isa::Avx512,
        };
        let usable = |path: &BytePath| least(*path) <= isa.vectors() && path.available();
        BytePath::ALL.into_iter().rev().find(usable).unwrap_or(BytePath::Scalar)
    }

    /// Its name: "scalar", "avx2", "avx-vnni" or "avx512-vnni".
    pub fn name(self) -> &'static str {
        match self {
            BytePath::Scalar => "scalar",
            BytePath::Avx2 => "avx2",
            BytePath::AvxVnni => "avx-vnni",
            BytePath::Avx512Vnni => "avx512-vnni",
        }
    }

    /// Whether the processor this runs on (and its operating system) can execute it.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        match self {
            BytePath::Scalar => true,
            BytePath::Avx2 => Isa::Avx2.available(),
            BytePath::AvxVnni => Isa::Avx2.available() && is_x86_feature_detected!("avxvnni"),
            BytePath::Avx512Vnni => Isa::Avx512.available() && is_x86_feature_detected!("avx512vnni"),
        }
    }

    /// Whether the processor this runs on can execute it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        self == BytePath::Scalar
    }
}
