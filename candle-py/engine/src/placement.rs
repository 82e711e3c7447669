//! Where a model computes, and how its weights are held there.

use candle_core::DType;

use crate::cpu::Storage;
use crate::error::{Error, Result};

/// A device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The CPU, with kernels of our own.
    #[default]
    Cpu,
    /// The CPU through Candle's tensors, slowly: what CUDA computes, on a machine without it. It is how that path is
    /// tested, has no name, and is nothing to compute with.
    Tensors,
    /// A CUDA device, by its number among those that the process sees.
    Cuda(usize),
}

impl Device {
    /// The device of that name: "cpu", "cuda" (the first), "cuda:1", or "auto", which is CUDA where there is some.
    ///
    /// # Errors
    /// [`Error::Device`] for CUDA in a build without it; [`Error::Input`] for a name that is none.
    pub fn from_name(name: &str) -> Result<Self> {
        let ordinal = match name {
            "cpu" => return Ok(Device::Cpu),
            "auto" if cuda_devices() > 0 => return Ok(Device::Cuda(0)),
            "auto" => return Ok(Device::Cpu),
            "cuda" => Some(0),
            _ => name.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        let is_cuda = name == "cuda" || name.starts_with("cuda:");
        if is_cuda && !has_cuda() {
            return Err(Error::device(format!("this build has no CUDA support: `{name}`"))
                .with_hint("use device cpu, or install a build with CUDA"));
        }
        ordinal.map(Device::Cuda).ok_or_else(|| {
            let hint = if has_cuda() { "auto, cpu, cuda or cuda:0" } else { "auto or cpu" };
            Error::input(format!("device is not known: `{name}`")).with_hint(hint)
        })
    }

    /// Its name.
    pub fn name(self) -> String {
        match self {
            Device::Cpu | Device::Tensors => "cpu".to_owned(),
            Device::Cuda(ordinal) => format!("cuda:{ordinal}"),
        }
    }

    /// The device as Candle has it.
    ///
    /// # Errors
    /// [`Error::Device`] where it is not there.
    pub(crate) fn open(self) -> Result<candle_core::Device> {
        match self {
            Device::Cpu | Device::Tensors => Ok(candle_core::Device::Cpu),
            Device::Cuda(ordinal) => open_cuda(ordinal).map_err(|error| {
                Error::device(format!("CUDA device cannot be used ({error}): `{}`", self.name()))
                    .with_hint(format!("this process sees so many CUDA devices: {}", cuda_devices()))
            }),
        }
    }
}

/// A CUDA device with one stream for all threads: what one of them queues, another may read.
fn open_cuda(ordinal: usize) -> candle_core::Result<candle_core::Device> {
    let device = candle_core::Device::new_cuda_with_stream(ordinal)?;
    #[cfg(feature = "cuda")]
    if let candle_core::Device::Cuda(device) = &device {
        // SAFETY: events would order the streams that use a tensor, and there is this one stream; cuBLAS, our kernels and
        // groups of ranks are given it, too.
        unsafe { device.disable_event_tracking() };
    }
    Ok(device)
}

/// How weights are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtype {
    /// As float32.
    #[default]
    Float32,
    /// Rounded to the nearest bfloat16: half the memory, float32's range.
    Bfloat16,
    /// Each 64 numbers of a matrix' row as signed bytes with a float32 scale, multiplied with rows in the same form; tables
    /// in bfloat16. On the CPU alone.
    Int8,
    /// Rounded to the nearest float16: half the memory, more digits than bfloat16, and a range that ends at 65504. Not on
    /// the CPU.
    Float16,
}

impl Dtype {
    const ALL: [Dtype; 4] = [Dtype::Float32, Dtype::Bfloat16, Dtype::Int8, Dtype::Float16];

    /// Its name: "float32", "bfloat16", "int8" or "float16".
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Float32 => "float32",
            Dtype::Bfloat16 => "bfloat16",
            Dtype::Int8 => "int8",
            Dtype::Float16 => "float16",
        }
    }

    /// The dtype of that name, or of "auto" on a device.
    ///
    /// # Errors
    /// [`Error::Device`] for one that the device does not have; [`Error::Input`] for a name that is none.
    pub fn from_name(name: &str, device: Device) -> Result<Self> {
        if name == "auto" {
            return Ok(Dtype::Float32);
        }
        let dtype = Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
            Error::input(format!("dtype is not known: `{name}`")).with_hint(match device {
                Device::Cpu => "auto, float32, bfloat16 or int8",
                _ => "auto, float32, bfloat16 or float16",
            })
        })?;
        match device {
            Device::Cpu => dtype.storage().map(drop)?,
            _ => dtype.of_tensors().map(drop)?,
        }
        Ok(dtype)
    }

    /// Bytes of that many numbers, `tables` of them in tables of embeddings.
    pub fn weight_bytes(self, numbers: usize, tables: usize) -> usize {
        match self {
            Dtype::Float32 => numbers * size_of::<f32>(),
            Dtype::Bfloat16 | Dtype::Float16 => numbers * size_of::<u16>(),
            Dtype::Int8 => tables * size_of::<u16>() + Storage::int8_bytes(numbers - tables),
        }
    }

    /// How the CPU's kernels hold it.
    pub(crate) fn storage(self) -> Result<Storage> {
        match self {
            Dtype::Float32 => Ok(Storage::Float32),
            Dtype::Bfloat16 => Ok(Storage::Bfloat16),
            Dtype::Int8 => Ok(Storage::Int8),
            Dtype::Float16 => Err(Error::device(format!("dtype is not supported on the CPU: `{}`", self.name()))
                .with_hint("use auto, float32, bfloat16 or int8; weights stored in another dtype are converted")),
        }
    }

    /// As Candle has it.
    ///
    /// # Errors
    /// [`Error::Device`] for what only the CPU's own kernels have.
    pub(crate) fn of_tensors(self) -> Result<DType> {
        match self {
            Dtype::Float32 => Ok(DType::F32),
            Dtype::Bfloat16 => Ok(DType::BF16),
            Dtype::Float16 => Ok(DType::F16),
            Dtype::Int8 => Err(Error::device(format!("dtype is on the CPU alone: `{}`", self.name()))
                .with_hint("use auto, float32, bfloat16 or float16")),
        }
    }
}

/// Whether this build can use CUDA.
pub const fn has_cuda() -> bool {
    cfg!(feature = "cuda")
}

/// CUDA devices that this process sees; 0 in a build without CUDA.
pub fn cuda_devices() -> usize {
    #[cfg(feature = "cuda")]
    {
        let count = candle_core::cuda_backend::cudarc::driver::CudaContext::device_count();
        count.ok().and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
    }
    #[cfg(not(feature = "cuda"))]
    0
}
