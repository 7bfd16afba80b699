//! KV caches of transformers in few bits, and attention on them: the safe way to the C interface of kvq.
//!
//! ```no_run
//! use kvq::{AttendOptions, Cache, CacheOptions, Tensor, TensorMut};
//!
//! # fn main() -> kvq::Result<()> {
//! # let (k, v, q, layer) = (vec![0f32; 8 * 128], vec![0f32; 8 * 128], vec![0f32; 32 * 128], 0);
//! let cache = Cache::new(&CacheOptions::new(32, 8, 128, "std4"))?;
//! let mut sequence = cache.new_sequence()?;
//! let mut out = vec![0f32; 32 * 128];
//! sequence.prefill(
//!     layer,
//!     &Tensor::new(&k, 1, 8, 128)?, // [tokens][heads][dim]
//!     &Tensor::new(&v, 1, 8, 128)?,
//!     &Tensor::new(&q, 1, 32, 128)?,
//!     &mut TensorMut::new(&mut out, 1, 32, 128)?,
//!     AttendOptions::default(),
//! )?;
//! # Ok(()) }
//! ```
//!
//! docs/guide/rust.md of the repository is the guide, include/kvq/kvq.h says what every call means. Errors are one sentence with the numbers in
//! it; on an error nothing has changed, but outputs may be written in part.
//!
//! Threads: `&self` methods may run together, `&mut self` methods not, as Rust has it. Objects are freed in any order.
mod cache;
mod error;
mod formats;
mod io;
mod layers;
mod options;
mod prefix_cache;
mod reports;
mod ring;
mod rows;
mod sequence;
mod tensor;

pub use cache::{
    AttendRequest, Cache, CacheOptions, KeyStatistics, PrefillRequest, Rotary, SelectRequest, StepRequest,
};
pub use error::{Error, Result, Status};
pub use formats::{formats, Format, FormatDescription, FormatEntry, Role, Statistics};
pub use layers::{DataType, Layer, LayerKind, SnapshotType, StatePart};
pub use options::{AttendOptions, Direction, Mods, Threads, TokenRange, Workspace};
pub use prefix_cache::{Match, MatchKind, Outcome, PrefixCache, PrefixCacheOptions, PrefixCacheStatistics};
pub use reports::{
    BudgetQuery, CacheInfo, ChosenTokens, Footprint, FootprintQuery, Requantize, RequantizeReport, SelectionReport,
    SkippingReport, Snapshot, StepDownPolicy, StepDownReport, Tier, Usage,
};
pub use ring::{Ring, RingOptions};
pub use rows::{attend_rows, Rows};
pub use sequence::{Receiver, Sequence};
pub use tensor::{Bf16, Tensor, TensorMut, Value, F16};

/// The version of the library, such as "0.3.0".
pub fn version() -> &'static str {
    // A text that lives as long as the program.
    unsafe { std::ffi::CStr::from_ptr(kvq_sys::kvq_version()) }
        .to_str()
        .unwrap_or("")
}
