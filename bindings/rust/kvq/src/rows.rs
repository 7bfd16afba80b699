//! Keys and values that another system keeps, in its bytes and its memory.
use std::{marker::PhantomData, os::raw::c_void, ptr};

use kvq_sys as sys;

use crate::{
    error::{check, int, Error, Result},
    formats::Format,
    options::{AttendOptions, Call},
    tensor::{Tensor, TensorMut, Value},
};

/// Keys or values of one layer: blocks of rows, [blocks][block_tokens][kv_heads][bytes of a row]. Nothing is copied.
pub struct Rows<'a> {
    format: Format,
    c: sys::kvq_rows,
    shape: [usize; 3],
    row: [usize; 3], // bytes, and those of scales and of biases that lie beside them
    of: PhantomData<&'a [u8]>,
}

impl<'a> Rows<'a> {
    /// format: of rows in the bytes of another system: "fp8", "nvfp4", "q8_0", ... shape: blocks, tokens of a block, kv heads.
    /// tensor_scale: by which numbers were divided (fp8, nvfp4), or 1. An error if the bytes are no whole rows.
    pub fn new(format: &str, data: &'a [u8], shape: [usize; 3], tensor_scale: f32) -> Result<Self> {
        Self::made(format, data, [None; 2], shape, tensor_scale)
    }
    /// The same where scales lie beside the rows (nvfp4, mxfp4, mla-584, ...), [blocks][block_tokens][kv_heads][scales of a row].
    pub fn with_scales(
        format: &str,
        data: &'a [u8],
        scales: &'a [u8],
        shape: [usize; 3],
        tensor_scale: f32,
    ) -> Result<Self> {
        Self::made(format, data, [Some(scales), None], shape, tensor_scale)
    }
    /// Of MLX, whose biases lie as its scales do.
    pub fn with_biases(
        format: &str,
        data: &'a [u8],
        scales: &'a [u8],
        biases: &'a [u8],
        shape: [usize; 3],
    ) -> Result<Self> {
        Self::made(format, data, [Some(scales), Some(biases)], shape, 1.0)
    }
    fn made(
        format: &str,
        data: &'a [u8],
        beside: [Option<&'a [u8]>; 2],
        shape: [usize; 3],
        tensor_scale: f32,
    ) -> Result<Self> {
        let [blocks, tokens, heads] = shape;
        let rows = blocks
            .checked_mul(tokens)
            .and_then(|n| n.checked_mul(heads))
            .unwrap_or(0);
        let bytes_of = |x: &[u8], name: &str| {
            if rows == 0 || x.is_empty() || x.len() % rows != 0 {
                return Err(Error::argument(format!(
                    "{} has {} bytes, no whole rows of {} blocks x {} tokens x {} heads",
                    name,
                    x.len(),
                    blocks,
                    tokens,
                    heads
                )));
            }
            Ok(x.len() / rows)
        };
        let row = [
            bytes_of(data, "data")?,
            beside[0].map_or(Ok(0), |s| bytes_of(s, "scales"))?,
            beside[1].map_or(Ok(0), |b| bytes_of(b, "biases"))?,
        ];
        if row[2] > 0 && row[2] != row[1] {
            return Err(Error::argument(format!(
                "a token and head has {} bytes of scales and {} of biases; both must be laid out alike",
                row[1], row[2]
            )));
        }
        let format = Format::find_rows(format, tensor_scale)?;
        let address = |x: Option<&'a [u8]>| x.map_or(ptr::null(), |s| s.as_ptr() as *const c_void);
        let stride = |of: usize, n: usize| (of * n) as isize; // at most the length of the slice
        let c = sys::kvq_rows {
            format: format.raw(),
            data: data.as_ptr() as *const c_void,
            token_stride: stride(row[0], heads),
            head_stride: stride(row[0], 1),
            block_stride: stride(row[0], heads * tokens),
            scales: address(beside[0]),
            scale_token_stride: stride(row[1], heads),
            scale_head_stride: stride(row[1], 1),
            scale_block_stride: stride(row[1], heads * tokens),
            scale_group_stride: 0,
            biases: address(beside[1]),
        };
        Ok(Rows {
            format,
            c,
            shape,
            row,
            of: PhantomData,
        })
    }
    fn expect_channels(&self, dim: i32, name: &str) -> Result<()> {
        let row = self.format.row_bytes(dim)?;
        if self.row == row {
            return Ok(());
        }
        Err(Error::argument(format!(
            "{} have {} bytes, {} of scales and {} of biases a token and head, but {} channels take {}, {} and {}",
            name, self.row[0], self.row[1], self.row[2], dim, row[0], row[1], row[2]
        )))
    }
}

/// softmax(q K^T) V for the last m tokens of a sequence that another system keeps. q: [m][q_heads][head_dim], out:
/// [m][q_heads][value_dim]; of latents, whose keys are their values, value_dim may be less. table: its blocks in order;
/// None: 0, 1, ... Without lists, selected_tokens and skipped_mass.
pub fn attend_rows<Q: Value, O: Value>(
    keys: &Rows,
    values: &Rows,
    tokens: usize,
    table: Option<&[i32]>,
    q: &Tensor<Q>,
    out: &mut TensorMut<O>,
    mut options: AttendOptions,
) -> Result<()> {
    if keys.shape != values.shape {
        return Err(Error::argument(format!(
            "keys have blocks x tokens x heads {:?}, values {:?}",
            keys.shape, values.shape
        )));
    }
    if q.c.dim < 1 || out.c.dim < 1 {
        return Err(Error::argument(format!(
            "q has {} channels, out {}",
            q.c.dim, out.c.dim
        )));
    }
    keys.expect_channels(q.c.dim, "keys")?;
    if !std::ptr::eq(keys, values) || out.c.dim > q.c.dim {
        values.expect_channels(out.c.dim, "values")?;
    }
    let [blocks, block_tokens, heads] = keys.shape;
    let all: Vec<i32>;
    let table = match table {
        Some(table) => table,
        None => {
            all = (0..int(blocks, "blocks")?).collect();
            &all
        }
    };
    let of = sys::kvq_row_blocks {
        table: table.as_ptr(),
        blocks: int(table.len(), "blocks")?,
        block_tokens: int(block_tokens, "block_tokens")?,
        memory_blocks: int(blocks, "blocks")?,
        tokens: int(tokens, "tokens")?,
        kv_heads: int(heads, "kv_heads")?,
    };
    let mut call = Call::new(&mut options, Some(&q.c))?;
    check(unsafe { sys::kvq_attend_rows(&keys.c, &values.c, &of, &q.c, &out.c, call.options()) })
}
