use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::os::raw::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use crate::error::{checked, Error};
use crate::{sys, Client, Connection};

/// What the numbers of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Dtype {
    Bool = 1,
    UInt8 = 2,
    Int8 = 3,
    UInt16 = 4,
    Int16 = 5,
    UInt32 = 6,
    Int32 = 7,
    UInt64 = 8,
    Int64 = 9,
    Float16 = 10,
    BFloat16 = 11,
    Float32 = 12,
    Float64 = 13,
    Float8E4M3Fn = 14,
    Float8E5M2 = 15,
    Float4E2M1FnX2 = 16,
}

impl Dtype {
    /// That of a number of the header.
    pub(crate) fn of(number: i32) -> Option<Dtype> {
        const ALL: [Dtype; 16] = [
            Dtype::Bool,
            Dtype::UInt8,
            Dtype::Int8,
            Dtype::UInt16,
            Dtype::Int16,
            Dtype::UInt32,
            Dtype::Int32,
            Dtype::UInt64,
            Dtype::Int64,
            Dtype::Float16,
            Dtype::BFloat16,
            Dtype::Float32,
            Dtype::Float64,
            Dtype::Float8E4M3Fn,
            Dtype::Float8E5M2,
            Dtype::Float4E2M1FnX2,
        ];
        ALL.iter().copied().find(|one| *one as i32 == number)
    }

    fn nbytes(self) -> usize {
        match self {
            Dtype::UInt16 | Dtype::Int16 | Dtype::Float16 | Dtype::BFloat16 => 2,
            Dtype::UInt32 | Dtype::Int32 | Dtype::Float32 => 4,
            Dtype::UInt64 | Dtype::Int64 | Dtype::Float64 => 8,
            _ => 1,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Numbers that memory may be made of: each pattern of bits is one.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// What a tensor of them is, unless it says something else.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {
        $(impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        })*
    };
}
elements!(u8 => UInt8, i8 => Int8, u16 => UInt16, i16 => Int16, u32 => UInt32, i32 => Int32, u64 => UInt64);
elements!(i64 => Int64, f32 => Float32, f64 => Float64);

/// Shared memory: a slice of numbers that workers can map. It goes when it is dropped.
///
/// A call that lost its broker, or a worker that it cannot reach, leaves its outputs to that worker for good: such a
/// block panics when it is read.
pub struct Block<T: Element> {
    connection: Arc<Connection>,
    data: *mut T,
    count: usize,
    is_lent: AtomicBool,
}

// A block is a slice that it owns.
unsafe impl<T: Element> Send for Block<T> {}
unsafe impl<T: Element> Sync for Block<T> {}

impl<T: Element> Block<T> {
    pub(crate) fn new(client: &Client, count: usize) -> Result<Block<T>, Error> {
        let mut data: *mut c_void = ptr::null_mut();
        let nbytes = count.checked_mul(std::mem::size_of::<T>()).ok_or_else(|| {
            Error::new("INVALID_ARGUMENT", format!("Ask for at most 2^46 bytes, not for {count} numbers"))
        })?;
        checked(|error| unsafe { sys::lz_alloc(client.raw(), nbytes, &mut data, error) })?;
        unsafe { ptr::write_bytes(data as *mut u8, 0, nbytes) };
        let connection = Arc::clone(&client.0);
        Ok(Block { connection, data: data as *mut T, count, is_lent: AtomicBool::new(false) })
    }

    /// A tensor of all the numbers, or the first ones.
    pub fn tensor(&self, shape: &[i64]) -> Tensor<'_> {
        self.check_own();
        Tensor { parts: Parts::new(self.data as *mut c_void, T::DTYPE, shape), memory: PhantomData }
    }

    /// The same, to be written by a call.
    pub fn tensor_mut(&mut self, shape: &[i64]) -> TensorMut<'_> {
        self.check_own();
        let mut parts = Parts::new(self.data as *mut c_void, T::DTYPE, shape);
        if shape.first() == Some(&0) {
            parts.nbytes = self.count * std::mem::size_of::<T>(); /* its size depends on the data: all of this is room */
        }
        TensorMut { parts, is_lent: &self.is_lent }
    }

    fn check_own(&self) {
        let is_lent = self.is_lent.load(Ordering::Relaxed);
        assert!(!is_lent, "use other memory: a call on this has lost its worker, which may still write to it");
    }
}

impl<T: Element> Deref for Block<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.check_own();
        unsafe { std::slice::from_raw_parts(self.data, self.count) }
    }
}

impl<T: Element> DerefMut for Block<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.check_own();
        unsafe { std::slice::from_raw_parts_mut(self.data, self.count) }
    }
}

impl<T: Element> Drop for Block<T> {
    fn drop(&mut self) {
        unsafe { sys::lz_free((self.connection).0, self.data as *mut c_void, ptr::null_mut()) };
    }
}

#[derive(Clone)]
pub(crate) struct Parts {
    pub data: *mut c_void,
    pub dtype: Dtype,
    pub shape: Vec<i64>,
    pub strides: Option<Vec<i64>>,
    pub nbytes: usize,
}

impl Parts {
    fn new(data: *mut c_void, dtype: Dtype, shape: &[i64]) -> Parts {
        Parts { data, dtype, shape: shape.to_vec(), strides: None, nbytes: 0 }
    }

    fn retyped(&mut self, dtype: Dtype) {
        let (had, has) = (self.dtype.nbytes(), dtype.nbytes());
        assert_eq!(had, has, "give a block of numbers of {has} bytes: {dtype:?} is no view of {:?}", self.dtype);
        self.dtype = dtype;
    }

    pub(crate) fn raw(&self) -> sys::Tensor {
        sys::Tensor {
            struct_size: std::mem::size_of::<sys::Tensor>(),
            dtype: self.dtype as i32,
            ndim: self.shape.len() as u32,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ref().map_or(ptr::null(), |strides| strides.as_ptr()),
            data: self.data,
            nbytes: self.nbytes,
        }
    }
}

/// A tensor that a call reads.
#[derive(Clone)]
pub struct Tensor<'a> {
    pub(crate) parts: Parts,
    memory: PhantomData<&'a [u8]>,
}

impl Tensor<'_> {
    /// Strides in elements. Panics unless there is one for each dimension.
    pub fn strided(mut self, strides: &[i64]) -> Self {
        assert_eq!(strides.len(), self.parts.shape.len(), "give as many strides as the tensor has dimensions");
        self.parts.strides = Some(strides.to_vec());
        self
    }

    /// The same bits as another type of as many bytes. Panics where it has others.
    pub fn typed(mut self, dtype: Dtype) -> Self {
        self.parts.retyped(dtype);
        self
    }
}

/// A tensor that a call writes.
pub struct TensorMut<'a> {
    pub(crate) parts: Parts,
    pub(crate) is_lent: &'a AtomicBool,
}

impl TensorMut<'_> {
    /// The same bits as another type of as many bytes. Panics where it has others.
    pub fn typed(mut self, dtype: Dtype) -> Self {
        self.parts.retyped(dtype);
        self
    }
}
