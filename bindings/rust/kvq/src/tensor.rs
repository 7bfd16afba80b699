//! Slices as tensors, [tokens][heads][dim].
use std::{marker::PhantomData, os::raw::c_void};

use kvq_sys as sys;

use crate::error::{int, Error, Result};

/// An IEEE half by its bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct F16(pub u16);

/// A bfloat16 by its bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bf16(pub u16);

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for super::F16 {}
    impl Sealed for super::Bf16 {}
}

/// A type of values: f32, [`F16`] or [`Bf16`].
pub trait Value: Copy + sealed::Sealed {
    #[doc(hidden)]
    const DTYPE: sys::kvq_dtype;
}
impl Value for f32 {
    const DTYPE: sys::kvq_dtype = sys::KVQ_FP32;
}
impl Value for F16 {
    const DTYPE: sys::kvq_dtype = sys::KVQ_FP16;
}
impl Value for Bf16 {
    const DTYPE: sys::kvq_dtype = sys::KVQ_BF16;
}

/// Values [tokens][heads][dim] that are read.
#[derive(Clone, Copy)]
pub struct Tensor<'a, T: Value> {
    pub(crate) c: sys::kvq_tensor,
    of: PhantomData<&'a [T]>,
}

/// Values [tokens][heads][dim] that are written.
///
/// ```compile_fail
/// let mut memory = vec![0f32; 4];
/// let out = kvq::TensorMut::new(&mut memory, 1, 1, 4)?;
/// let other = kvq::TensorMut::new(&mut memory, 1, 1, 4)?; // borrowed by `out`
/// drop((out, other));
/// # Ok::<(), kvq::Error>(())
/// ```
pub struct TensorMut<'a, T: Value> {
    pub(crate) c: sys::kvq_tensor,
    of: PhantomData<&'a mut [T]>,
}

fn product(tokens: usize, heads: usize, dim: usize) -> Option<usize> {
    tokens.checked_mul(heads)?.checked_mul(dim)
}

/// A tensor in `values` values, checked. strides: of tokens and of heads, in values
fn describe(values: usize, shape: [usize; 3], strides: Option<[usize; 2]>, written: bool) -> Result<sys::kvq_tensor> {
    let [tokens, heads, dim] = shape;
    let size = product(tokens, heads, dim).unwrap_or(usize::MAX);
    let wrong = |why: &str| {
        Err(Error::argument(format!(
            "a tensor of {} tokens x {} heads x {} channels{} {}, in a slice of {} values",
            tokens,
            heads,
            dim,
            strides.map_or(String::new(), |s| format!(" with strides {} and {}", s[0], s[1])),
            why,
            values
        )))
    };
    let mut both = [0, 0]; // dense
    match strides {
        None => {
            if size != values {
                return wrong(&format!("has {} values", size));
            }
        }
        Some(_) if size == 0 => {}
        Some([of_tokens, of_heads]) => {
            let last = (|| {
                let token = (tokens - 1).checked_mul(of_tokens)?;
                let head = (heads - 1).checked_mul(of_heads)?;
                token.checked_add(head)?.checked_add(dim)
            })();
            if last.map_or(true, |end| end > values) {
                return wrong("ends outside");
            }
            // The stride of an axis with one entry means nothing.
            let of_heads = if heads > 1 { of_heads } else { dim };
            let of_tokens = if tokens > 1 { of_tokens } else { heads * dim };
            let shares = if of_heads <= of_tokens {
                of_heads < dim || (tokens > 1 && of_tokens < (heads - 1) * of_heads + dim)
            } else {
                of_tokens < dim || (heads > 1 && of_heads < (tokens - 1) * of_tokens + dim)
            };
            if (written && shares) || (of_tokens == 0 && of_heads == 0) {
                return wrong("holds the same values more than once");
            }
            both = [of_tokens, of_heads];
        }
    }
    let stride = |s: usize| isize::try_from(s).map_err(|_| Error::argument(format!("a stride is {}", s)));
    Ok(sys::kvq_tensor {
        data: std::ptr::null_mut(),
        dtype: 0,
        tokens: int(tokens, "tokens")?,
        heads: int(heads, "heads")?,
        dim: int(dim, "dim")?,
        token_stride: stride(both[0])?,
        head_stride: stride(both[1])?,
    })
}

impl<'a, T: Value> Tensor<'a, T> {
    /// All of a slice, [tokens][heads][dim]. An error if it has another number of values.
    pub fn new(values: &'a [T], tokens: usize, heads: usize, dim: usize) -> Result<Self> {
        Self::made(values, [tokens, heads, dim], None)
    }
    /// Part of a slice: value (t, h, d) is at t * strides[0] + h * strides[1] + d. An error if it ends outside.
    pub fn strided(values: &'a [T], shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        Self::made(values, shape, Some(strides))
    }
    fn made(values: &'a [T], shape: [usize; 3], strides: Option<[usize; 2]>) -> Result<Self> {
        let mut c = describe(values.len(), shape, strides, false)?;
        c.data = values.as_ptr() as *mut c_void; // of an input, which is not written
        c.dtype = T::DTYPE;
        Ok(Tensor { c, of: PhantomData })
    }
}

impl<'a, T: Value> TensorMut<'a, T> {
    /// As [`Tensor::new`].
    pub fn new(values: &'a mut [T], tokens: usize, heads: usize, dim: usize) -> Result<Self> {
        Self::made(values, [tokens, heads, dim], None)
    }
    /// As [`Tensor::strided`]; no value may be there twice.
    pub fn strided(values: &'a mut [T], shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        Self::made(values, shape, Some(strides))
    }
    fn made(values: &'a mut [T], shape: [usize; 3], strides: Option<[usize; 2]>) -> Result<Self> {
        let mut c = describe(values.len(), shape, strides, true)?;
        c.data = values.as_mut_ptr() as *mut c_void;
        c.dtype = T::DTYPE;
        Ok(TensorMut { c, of: PhantomData })
    }
}
