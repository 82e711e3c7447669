//! Instruction sets: which twin of every kernel runs. Chosen once, at load time; holds no kernel itself.

/// An instruction set that the kernels are written for, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust: any processor (and what aarch64 runs).
    Scalar,
    /// AVX2 with FMA, 8 lanes.
    Avx2,
    /// AVX-512 F/BW/VL/DQ, 16 lanes.
    Avx512,
}

impl Isa {
    /// Every instruction set, weakest first.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

    /// The strongest instruction set of the processor this runs on.
    pub fn detected() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Isa::Scalar)
    }

    /// The instruction set called `name` ("scalar", "avx2", "avx512"), whether or not this processor has it.
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name)
    }

    /// The name that `from_name` takes.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Whether the processor this runs on (and its operating system) can execute it.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
        }
    }

    /// Whether the processor this runs on can execute it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        self == Isa::Scalar
    }
}
