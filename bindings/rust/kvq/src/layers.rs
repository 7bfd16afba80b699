//! The layers of a model: what each of them holds, and of which shape.
use kvq_sys as sys;

use crate::error::{int, Result, Text};

/// What a layer holds. Windows and chunks free pages by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerKind {
    /// All of its tokens.
    #[default]
    Full,
    /// A query sees itself and the window - 1 tokens before it.
    Sliding,
    /// A query sees the tokens of its own chunk: from the last multiple of the window on (Llama 4).
    Chunked,
    /// Nothing: it reads the keys and values of an earlier layer, under its window (Gemma 3n and 4).
    Shared,
    /// Keys and values of another text, such as an encoder's (Whisper).
    Cross,
    /// Recurrent state in place of keys and values (Gated DeltaNet, Mamba, RWKV).
    State,
    /// Latents, which are keys and in their first value_dim channels values (MLA).
    Latent,
    /// One key per token, by which queries select tokens (DeepSeek V3.2).
    Index,
}

/// One layer of a model: `Layer { value_dim: Some(64), ..Layer::full_attention(8, 128) }`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layer {
    pub kind: LayerKind,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Channels of values; None: head_dim.
    pub value_dim: Option<usize>,
    /// Tokens of a sliding window or a chunk, at least 1; of a latent layer its rotary channels; 0 of other kinds.
    pub window: usize,
    /// First tokens that every query sees as well, at most those of the cache; of layers with a window.
    pub sinks: usize,
    /// Of layers with state, which have no heads and channels.
    pub parts: Vec<StatePart>,
    /// Of a shared layer the earlier one whose keys and values it reads; 0 of other kinds.
    pub owner: usize,
}
impl Layer {
    pub fn full_attention(kv_heads: usize, head_dim: usize) -> Self {
        Layer {
            kv_heads,
            head_dim,
            ..Layer::default()
        }
    }
    pub fn sliding_attention(window: usize, kv_heads: usize, head_dim: usize) -> Self {
        Layer {
            kind: LayerKind::Sliding,
            window,
            ..Layer::full_attention(kv_heads, head_dim)
        }
    }
    pub fn chunked_attention(window: usize, kv_heads: usize, head_dim: usize) -> Self {
        Layer {
            kind: LayerKind::Chunked,
            window,
            ..Layer::full_attention(kv_heads, head_dim)
        }
    }
    /// It takes queries only: prefill with k and v of 0 tokens, once after each prefill of the owner, or attend.
    pub fn shared_with(owner: usize) -> Self {
        Layer {
            kind: LayerKind::Shared,
            owner,
            ..Layer::default()
        }
    }
    /// One append or prefill, then any number of queries in attend, which see all of it.
    pub fn cross(kv_heads: usize, head_dim: usize) -> Self {
        Layer {
            kind: LayerKind::Cross,
            ..Layer::full_attention(kv_heads, head_dim)
        }
    }
    pub fn state(parts: Vec<StatePart>) -> Self {
        Layer {
            kind: LayerKind::State,
            parts,
            ..Layer::default()
        }
    }
    /// Its first latent_channels are normed, the others rotated. It takes no values.
    pub fn latent(latent_channels: usize, rotary_channels: usize) -> Self {
        Layer {
            kind: LayerKind::Latent,
            value_dim: Some(latent_channels),
            window: rotary_channels,
            ..Layer::full_attention(1, latent_channels + rotary_channels)
        }
    }
    /// Keys by which queries select the tokens that other layers attend to: `Sequence::select`. It takes no values.
    pub fn index(channels: usize) -> Self {
        Layer {
            kind: LayerKind::Index,
            ..Layer::full_attention(1, channels)
        }
    }
    pub(crate) fn to_c(&self) -> Result<sys::kvq_layer> {
        Ok(sys::kvq_layer {
            kind: match self.kind {
                LayerKind::Full => sys::KVQ_FULL_ATTENTION,
                LayerKind::Sliding => sys::KVQ_SLIDING_ATTENTION,
                LayerKind::Chunked => sys::KVQ_CHUNKED_ATTENTION,
                LayerKind::Shared => sys::KVQ_SHARED,
                LayerKind::Cross => sys::KVQ_CROSS_ATTENTION,
                LayerKind::State => sys::KVQ_STATE,
                LayerKind::Latent => sys::KVQ_LATENT,
                LayerKind::Index => sys::KVQ_INDEX,
            },
            kv_heads: int(self.kv_heads, "kv_heads")?,
            head_dim: int(self.head_dim, "head_dim")?,
            value_dim: int(self.value_dim.unwrap_or(0), "value_dim")?,
            window: int(self.window, "window")?,
            sinks: int(self.sinks, "sinks")?,
            owner: int(self.owner, "owner")?,
        })
    }
}

/// The type of the values of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
    F32,
    F16,
    Bf16,
}

/// How snapshots hold a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotType {
    Exact,
    /// A scale for a head and row.
    Int8Rows,
    /// A scale for a head and column: k channels are the columns of a state [heads][v][k].
    Int8Columns,
    /// A scale for a head and 32 rows.
    E4m3,
}

/// A tensor [heads][rows][columns] of the recurrent state of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePart {
    /// Of its own within the layer.
    pub name: String,
    pub dtype: DataType,
    pub heads: usize,
    pub rows: usize,
    pub columns: usize,
    pub snapshot: SnapshotType,
}
impl StatePart {
    /// A part of f32 that snapshots hold exactly.
    pub fn new(name: &str, heads: usize, rows: usize, columns: usize) -> Self {
        StatePart {
            name: name.into(),
            dtype: DataType::F32,
            heads,
            rows,
            columns,
            snapshot: SnapshotType::Exact,
        }
    }
    /// A struct that points into `name`.
    pub(crate) fn to_c(&self, layer: i32, name: &Text) -> Result<sys::kvq_state_part> {
        Ok(sys::kvq_state_part {
            name: name.as_ptr(),
            layer,
            dtype: match self.dtype {
                DataType::F32 => sys::KVQ_FP32,
                DataType::F16 => sys::KVQ_FP16,
                DataType::Bf16 => sys::KVQ_BF16,
            },
            heads: int(self.heads, "heads")?,
            rows: int(self.rows, "rows")?,
            columns: int(self.columns, "columns")?,
            snapshot: match self.snapshot {
                SnapshotType::Exact => sys::KVQ_SNAPSHOT_EXACT,
                SnapshotType::Int8Rows => sys::KVQ_SNAPSHOT_INT8_ROWS,
                SnapshotType::Int8Columns => sys::KVQ_SNAPSHOT_INT8_COLUMNS,
                SnapshotType::E4m3 => sys::KVQ_SNAPSHOT_E4M3,
            },
        })
    }
}
