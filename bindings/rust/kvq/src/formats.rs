//! Formats by name, and statistics from which keys are made.
use std::{io::Write, os::raw::c_void, ptr};

use kvq_sys as sys;

use crate::{
    error::{ask, check, handle, init, int, text_of, Error, Result, Text},
    io::with_writer,
    tensor::{Tensor, TensorMut, Value},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Key,
    Value,
}
impl Role {
    pub(crate) fn to_c(self) -> sys::kvq_role {
        match self {
            Role::Key => sys::KVQ_KEY,
            Role::Value => sys::KVQ_VALUE,
        }
    }
}

/// A format that has a name. K and V of one name may be two entries.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FormatEntry {
    pub name: String,
    /// It holds keys.
    pub keys: bool,
    /// It holds values.
    pub values: bool,
    /// Keys can be made from statistics.
    pub takes_statistics: bool,
    /// Values that share a scale, the G of the name; 0: none.
    pub group: usize,
    pub preset: bool,
}

/// All formats of the library. Other groups than those listed may be asked for by name, too.
pub fn formats() -> Result<Vec<FormatEntry>> {
    let count: i32 = ask(|out| unsafe { sys::kvq_format_count(out) })?;
    (0..count)
        .map(|i| {
            let mut c = init!(kvq_format_entry {});
            check(unsafe { sys::kvq_format_list(i, &mut c) })?;
            Ok(FormatEntry {
                name: text_of(c.name),
                keys: c.keys != 0,
                values: c.values != 0,
                takes_statistics: c.takes_statistics != 0,
                group: c.group as usize,
                preset: c.preset != 0,
            })
        })
        .collect()
}

handle!(
    /// Sums over the first tokens of a text, a few hundred: keys of mix4 to mix6, low3 and low2 get channel widths from them, those of hi6 to low2
    /// error feedback.
    Statistics,
    kvq_statistics,
    kvq_statistics_free
);
impl Statistics {
    /// products: also sum q q^T, which error feedback needs (head_dim^2 doubles per layer and kv head)
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize, products: bool) -> Result<Self> {
        let (l, h, d) = (
            int(layers, "layers")?,
            int(kv_heads, "kv_heads")?,
            int(head_dim, "head_dim")?,
        );
        Self::make(|out| unsafe { sys::kvq_statistics_create(l, h, d, products as i32, out) })
    }
    /// What [`Statistics::save`] wrote.
    pub fn load(data: &[u8]) -> Result<Self> {
        Self::make(|out| unsafe { sys::kvq_statistics_load(data.as_ptr() as *const c_void, data.len(), out) })
    }
    pub fn save(&self, to: &mut dyn Write) -> Result<()> {
        with_writer(to, |write, user| {
            check(unsafe { sys::kvq_statistics_save(self.raw(), write, user) })
        })
    }
    /// Adds keys of consecutive tokens, [n][kv_heads][head_dim]. Whole groups of 64 tokens count, and a last one of at least 16.
    pub fn add_keys<T: Value>(&mut self, layer: usize, k: &Tensor<T>) -> Result<()> {
        check(unsafe { sys::kvq_statistics_add_keys(self.raw(), int(layer, "layer")?, &k.c) })
    }
    /// Adds keys of tokens [first, first + count) of all layers of a sequence, as its pages give them.
    pub fn add_sequence(&mut self, sequence: &crate::Sequence, first: usize, count: usize) -> Result<()> {
        let (first, count) = (int(first, "first")?, int(count, "count")?);
        check(unsafe { sys::kvq_statistics_add_sequence(self.raw(), sequence.raw(), first, count) })
    }
    /// Adds queries, [n][q_heads][head_dim].
    pub fn add_queries<T: Value>(&mut self, layer: usize, q: &Tensor<T>) -> Result<()> {
        check(unsafe { sys::kvq_statistics_add_queries(self.raw(), int(layer, "layer")?, &q.c) })
    }
}

/// A format on this CPU, for blocks of a shape.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FormatDescription {
    /// Of the scheme.
    pub name: String,
    pub backend: String,
    /// Per value, parameters included.
    pub bits: f64,
    /// Of one head of a page, a multiple of 16.
    pub block_bytes: usize,
    /// In vectors; else in a portable loop, which is slower.
    pub quantize: bool,
    pub dequantize: bool,
    pub attend: bool,
    /// Attention multiplies a dequantized copy of each block.
    pub dequantizes_first: bool,
    /// fp32, fp16 or bf16, not quantized.
    pub holds_values: bool,
    /// By which it was found, such as "std4".
    pub asked_name: String,
    /// The header of the kernel, or "portable: " and the reason; so are the next two.
    pub quantize_by: String,
    pub dequantize_by: String,
    pub attend_by: String,
}

mod raw {
    crate::error::handle!(RawFormat, kvq_format, kvq_format_free);
}

/// A format by name, for keys or for values.
pub struct Format {
    handle: raw::RawFormat,
    role: Role,
}
impl Format {
    /// name: fp16, bf16, fp32, int8, e4m3, affine-B-gG, kivi-B-gG (B: 1 to 8 bits; G: values that share a scale), or one of the presets
    /// ref8, hi6, std5, std4, mix4, mix5, mix6, low3, low2, hi6-h, std5-h, std4-h, low3-h, low2-h; in the bytes of other systems fp8, fp8-e5m2,
    /// nvfp4, mxfp8, mxfp4, q8_0, q4_0, q4_1, q5_0, q5_1, q6_0, iq4_nl, nvfp4-4over6; with "-bounds" at the end,
    /// keys carry bounds for `Mods::selected_tokens`; with "-fp16x64" their last 64 channels are 16 bit, with "-ref8x64" or
    /// "-int8x64" 8 bit (`Layer::latent`)
    pub fn find(name: &str, role: Role) -> Result<Self> {
        Self::made(name, role, None)
    }
    /// The same, made from statistics if it takes them.
    pub fn from_statistics(name: &str, role: Role, statistics: &Statistics) -> Result<Self> {
        Self::made(name, role, Some(statistics))
    }
    fn made(name: &str, role: Role, statistics: Option<&Statistics>) -> Result<Self> {
        let name = Text::new(name)?;
        let of = statistics.map_or(ptr::null(), |s| s.raw() as *const _);
        let handle = raw::RawFormat::make(|out| unsafe { sys::kvq_format_find(name.as_ptr(), role.to_c(), of, out) })?;
        Ok(Format { handle, role })
    }
    /// Of rows in the bytes of another system.
    pub(crate) fn find_rows(name: &str, tensor_scale: f32) -> Result<Self> {
        let name = Text::new(name)?;
        let handle =
            raw::RawFormat::make(|out| unsafe { sys::kvq_format_find_rows(name.as_ptr(), tensor_scale, out) })?;
        Ok(Format {
            handle,
            role: Role::Key,
        })
    }
    pub(crate) fn raw(&self) -> *const sys::kvq_format {
        self.handle.raw()
    }
    /// Of a token and head in the bytes of another system: in its row, and of scales and biases that lie beside it.
    pub(crate) fn row_bytes(&self, dim: i32) -> Result<[usize; 3]> {
        let (mut row, mut scales, mut biases) = (0, 0, 0);
        check(unsafe { sys::kvq_format_row_bytes(self.handle.raw(), dim, &mut row, &mut scales, &mut biases) })?;
        Ok([row as usize, scales as usize, biases as usize])
    }
    /// Describes it for blocks of tokens x dim values.
    pub fn describe(&self, tokens: usize, dim: usize) -> Result<FormatDescription> {
        let mut c = init!(kvq_format_description {});
        let (tokens, dim) = (int(tokens, "tokens")?, int(dim, "dim")?);
        check(unsafe { sys::kvq_format_describe(self.handle.raw(), self.role.to_c(), tokens, dim, &mut c) })?;
        Ok(FormatDescription {
            name: text_of(c.name),
            backend: text_of(c.backend),
            bits: c.bits,
            block_bytes: c.block_bytes,
            quantize: c.quantize != 0,
            dequantize: c.dequantize != 0,
            attend: c.attend != 0,
            dequantizes_first: c.dequantizes_first != 0,
            holds_values: c.holds_values != 0,
            asked_name: text_of(c.asked_name),
            quantize_by: text_of(c.quantize_by.as_ptr()),
            dequantize_by: text_of(c.dequantize_by.as_ptr()),
            attend_by: text_of(c.attend_by.as_ptr()),
        })
    }
    /// The page of these tensors, its bytes and those of the workspace. layer, first_head: see quantize
    fn shape(
        &self,
        x: &sys::kvq_tensor,
        layer: usize,
        first_head: usize,
    ) -> Result<(sys::kvq_page_shape, usize, usize)> {
        let shape = sys::kvq_page_shape {
            role: self.role.to_c(),
            tokens: x.tokens,
            heads: x.heads,
            dim: x.dim,
            layer: int(layer, "layer")?,
            first_head: int(first_head, "first_head")?,
        };
        let (mut page, mut work) = (0, 0);
        check(unsafe { sys::kvq_format_page_bytes(self.handle.raw(), &shape, &mut page, &mut work) })?;
        Ok((shape, page, work))
    }
    /// Quantizes values [tokens][heads][dim] to a page: the bytes that a cache writes whose window has their type.
    /// layer, first_head: of the model, for formats that were made from statistics; else 0
    pub fn quantize<T: Value>(&self, values: &Tensor<T>, layer: usize, first_head: usize) -> Result<Vec<u8>> {
        let (shape, page_bytes, work_bytes) = self.shape(&values.c, layer, first_head)?;
        let (mut page, mut work) = (Aligned::new(page_bytes), Aligned::new(work_bytes));
        check(unsafe {
            sys::kvq_format_quantize(
                self.handle.raw(),
                &shape,
                &values.c,
                page.as_mut_ptr(),
                page_bytes,
                work.as_mut_ptr(),
                work_bytes,
                ptr::null_mut(),
            )
        })?;
        Ok(page.bytes()[..page_bytes].to_vec())
    }
    /// Dequantizes a page to out, [tokens][heads][dim], rounded once.
    pub fn dequantize<T: Value>(
        &self,
        page: &[u8],
        out: &mut TensorMut<T>,
        layer: usize,
        first_head: usize,
    ) -> Result<()> {
        let (shape, page_bytes, work_bytes) = self.shape(&out.c, layer, first_head)?;
        if page.len() != page_bytes {
            let message = format!("a page of this shape has {} bytes, not {}", page_bytes, page.len());
            return Err(Error::argument(message));
        }
        let (mut held, mut work) = (Aligned::new(page_bytes), Aligned::new(work_bytes));
        held.bytes()[..page_bytes].copy_from_slice(page);
        check(unsafe {
            sys::kvq_format_dequantize(
                self.handle.raw(),
                &shape,
                held.as_mut_ptr(),
                page_bytes,
                &out.c,
                work.as_mut_ptr(),
                work_bytes,
            )
        })
    }
}

/// Bytes at an address that is a multiple of 64.
struct Aligned(Vec<Line>);
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);
impl Aligned {
    fn new(bytes: usize) -> Self {
        Aligned(vec![Line([0; 64]); bytes / 64 + 1])
    }
    fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.as_mut_ptr() as *mut c_void
    }
    fn bytes(&mut self) -> &mut [u8] {
        unsafe {
            std::slice::from_raw_parts_mut(
                self.0.as_mut_ptr() as *mut u8,
                self.0.len() * std::mem::size_of_val(&self.0[0].0),
            )
        }
    }
}
