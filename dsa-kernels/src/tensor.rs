//! Activation buffers and the row-major matrices borrowed from them.

use crate::device::{Mem, MemSlice};
use crate::error::KernelError;

/// Element type of a [`Buffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 32-bit signed integer.
    I32,
}

/// Memory of one tensor, owned by one holder: `&mut` access is exclusive, so on the host it can be
/// a slice. Page memory, which others may read, is [`crate::Mem`] instead.
///
/// A buffer on a device ([`Buffer::on_device`]) is for the operations of that device; its values are
/// not to be had as a slice, but through [`crate::Kernels::fetch`] and [`crate::Kernels::put`].
#[derive(Debug)]
pub struct Buffer {
    repr: Repr,
}

#[derive(Debug)]
enum Repr {
    F32(Vec<f32>),
    I32(Vec<i32>),
    Device { dtype: DType, mem: Mem, len: usize },
}

/// Bytes of an element, of either type.
const ELEMENT: usize = 4;

impl Buffer {
    /// Zeroed host buffer of `len` elements.
    #[must_use]
    pub fn host(dtype: DType, len: usize) -> Self {
        let repr = match dtype {
            DType::F32 => Repr::F32(vec![0.0; len]),
            DType::I32 => Repr::I32(vec![0; len]),
        };
        Self { repr }
    }

    /// Host buffer holding `values`.
    #[must_use]
    pub fn from_f32(values: Vec<f32>) -> Self {
        Self { repr: Repr::F32(values) }
    }

    /// A buffer over all of an allocation of a device.
    #[must_use]
    pub fn on_device(dtype: DType, mem: Mem) -> Self {
        let len = usize::try_from(mem.len()).unwrap_or(usize::MAX) / ELEMENT;
        Self { repr: Repr::Device { dtype, mem, len } }
    }

    /// Element count.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.repr {
            Repr::F32(v) => v.len(),
            Repr::I32(v) => v.len(),
            Repr::Device { len, .. } => *len,
        }
    }

    /// Whether it holds no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match &self.repr {
            Repr::F32(_) => DType::F32,
            Repr::I32(_) => DType::I32,
            Repr::Device { dtype, .. } => *dtype,
        }
    }

    /// Grows to at least `len` elements if it is on the host; contents are unspecified afterwards.
    pub fn ensure(&mut self, len: usize) {
        match &mut self.repr {
            Repr::F32(v) if v.len() < len => v.resize(len, 0.0),
            Repr::I32(v) if v.len() < len => v.resize(len, 0),
            Repr::F32(_) | Repr::I32(_) | Repr::Device { .. } => {}
        }
    }

    /// The first `rows * cols` elements as a matrix.
    pub fn view(&self, rows: usize, cols: usize) -> Result<TensorRef<'_>, KernelError> {
        self.rows(0, rows, cols)
    }

    /// `rows` rows of a matrix with `cols` columns, from row `first` on.
    pub fn rows(
        &self,
        first: usize,
        rows: usize,
        cols: usize,
    ) -> Result<TensorRef<'_>, KernelError> {
        let (from, to) = (first * cols, (first + rows) * cols);
        KernelError::in_buffer(to, self.len())?;
        Ok(match &self.repr {
            Repr::F32(v) => TensorRef { data: DataRef::F32(&v[from..to]), rows, cols },
            Repr::I32(v) => TensorRef { data: DataRef::I32(&v[from..to]), rows, cols },
            Repr::Device { dtype, mem, .. } => {
                TensorRef { data: DataRef::Device(*dtype, part(mem, from, to)), rows, cols }
            }
        })
    }

    /// The first `rows * cols` elements as a writable matrix.
    pub fn view_mut(&mut self, rows: usize, cols: usize) -> Result<TensorMut<'_>, KernelError> {
        let to = rows * cols;
        KernelError::in_buffer(to, self.len())?;
        Ok(match &mut self.repr {
            Repr::F32(v) => TensorMut { data: DataMut::F32(&mut v[..to]), rows, cols },
            Repr::I32(v) => TensorMut { data: DataMut::I32(&mut v[..to]), rows, cols },
            Repr::Device { dtype, mem, .. } => {
                TensorMut { data: DataMut::Device(*dtype, part(mem, 0, to)), rows, cols }
            }
        })
    }
}

/// Elements `from..to` of device memory.
#[derive(Clone, Copy, Debug)]
struct Part<'a> {
    mem: &'a Mem,
    offset: u64,
    len: u64,
}

fn part(mem: &Mem, from: usize, to: usize) -> Part<'_> {
    let bytes = |elements: usize| (elements * ELEMENT) as u64;
    Part { mem, offset: bytes(from), len: bytes(to - from) }
}

impl Part<'_> {
    fn slice(&self) -> MemSlice {
        MemSlice { mem: self.mem.clone(), offset: self.offset, len: self.len }
    }
}

fn not_here(want: DType, found: DType) -> KernelError {
    if want == found { KernelError::OnDevice } else { KernelError::Dtype { want, found } }
}

/// Borrowed matrix `[rows, cols]`.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    data: DataRef<'a>,
    rows: usize,
    cols: usize,
}

#[derive(Clone, Copy, Debug)]
enum DataRef<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
    Device(DType, Part<'a>),
}

impl<'a> TensorRef<'a> {
    /// Matrix over a host slice.
    pub fn from_f32(data: &'a [f32], rows: usize, cols: usize) -> Result<Self, KernelError> {
        KernelError::in_buffer(rows * cols, data.len())?;
        Ok(Self { data: DataRef::F32(&data[..rows * cols]), rows, cols })
    }

    /// Matrix over a host slice.
    pub fn from_i32(data: &'a [i32], rows: usize, cols: usize) -> Result<Self, KernelError> {
        KernelError::in_buffer(rows * cols, data.len())?;
        Ok(Self { data: DataRef::I32(&data[..rows * cols]), rows, cols })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self.data {
            DataRef::F32(_) => DType::F32,
            DataRef::I32(_) => DType::I32,
            DataRef::Device(dtype, _) => dtype,
        }
    }

    /// The elements in device memory, if they are there.
    #[must_use]
    pub fn device(&self) -> Option<MemSlice> {
        match self.data {
            DataRef::F32(_) | DataRef::I32(_) => None,
            DataRef::Device(_, part) => Some(part.slice()),
        }
    }

    /// All elements, if they are on the host.
    pub fn f32(&self) -> Result<&'a [f32], KernelError> {
        match self.data {
            DataRef::F32(v) => Ok(v),
            DataRef::I32(_) => Err(KernelError::Dtype { want: DType::F32, found: DType::I32 }),
            DataRef::Device(found, _) => Err(not_here(DType::F32, found)),
        }
    }

    /// All elements, if they are on the host.
    pub fn i32(&self) -> Result<&'a [i32], KernelError> {
        match self.data {
            DataRef::I32(v) => Ok(v),
            DataRef::F32(_) => Err(KernelError::Dtype { want: DType::I32, found: DType::F32 }),
            DataRef::Device(found, _) => Err(not_here(DType::I32, found)),
        }
    }
}

/// Borrowed writable matrix `[rows, cols]`.
#[derive(Debug)]
pub struct TensorMut<'a> {
    data: DataMut<'a>,
    rows: usize,
    cols: usize,
}

#[derive(Debug)]
enum DataMut<'a> {
    F32(&'a mut [f32]),
    I32(&'a mut [i32]),
    Device(DType, Part<'a>),
}

impl<'a> TensorMut<'a> {
    /// Matrix over a host slice.
    pub fn from_f32(data: &'a mut [f32], rows: usize, cols: usize) -> Result<Self, KernelError> {
        KernelError::in_buffer(rows * cols, data.len())?;
        Ok(Self { data: DataMut::F32(&mut data[..rows * cols]), rows, cols })
    }

    /// Matrix over a host slice.
    pub fn from_i32(data: &'a mut [i32], rows: usize, cols: usize) -> Result<Self, KernelError> {
        KernelError::in_buffer(rows * cols, data.len())?;
        Ok(Self { data: DataMut::I32(&mut data[..rows * cols]), rows, cols })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The elements in device memory, if they are there.
    #[must_use]
    pub fn device(&self) -> Option<MemSlice> {
        match &self.data {
            DataMut::F32(_) | DataMut::I32(_) => None,
            DataMut::Device(_, part) => Some(part.slice()),
        }
    }

    /// All elements, if they are on the host.
    pub fn f32(&mut self) -> Result<&mut [f32], KernelError> {
        match &mut self.data {
            DataMut::F32(v) => Ok(v),
            DataMut::I32(_) => Err(KernelError::Dtype { want: DType::F32, found: DType::I32 }),
            DataMut::Device(found, _) => Err(not_here(DType::F32, *found)),
        }
    }

    /// All elements, if they are on the host.
    pub fn i32(&mut self) -> Result<&mut [i32], KernelError> {
        match &mut self.data {
            DataMut::I32(v) => Ok(v),
            DataMut::F32(_) => Err(KernelError::Dtype { want: DType::I32, found: DType::F32 }),
            DataMut::Device(found, _) => Err(not_here(DType::I32, *found)),
        }
    }

    /// All elements, for as long as the tensor was borrowed.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn into_f32(self) -> Result<&'a mut [f32], KernelError> {
        match self.data {
            DataMut::F32(v) => Ok(v),
            DataMut::I32(_) => Err(KernelError::Dtype { want: DType::F32, found: DType::I32 }),
            DataMut::Device(found, _) => Err(not_here(DType::F32, found)),
        }
    }

    /// All elements, for as long as the tensor was borrowed.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn into_i32(self) -> Result<&'a mut [i32], KernelError> {
        match self.data {
            DataMut::I32(v) => Ok(v),
            DataMut::F32(_) => Err(KernelError::Dtype { want: DType::I32, found: DType::F32 }),
            DataMut::Device(found, _) => Err(not_here(DType::I32, found)),
        }
    }
}
