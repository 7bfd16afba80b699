//! tests/c_interface/scenario.c in Rust: the same arguments, the same hash, the same file.
//!
//! scenario KEYS VALUES FILE
use kvq::{AttendOptions, Cache, CacheOptions, Sequence, Tensor, TensorMut};
use std::path::Path;

const LAYERS: usize = 2;
const KV_HEADS: usize = 2;
const Q_HEADS: usize = 4;
const DIM: usize = 64;
const CHUNK: usize = 100;

/// FNV-1a, 64 bits.
struct Hash(u64);
impl Hash {
    fn add(&mut self, values: &[f32]) {
        for byte in values.iter().flat_map(|v| v.to_ne_bytes()) {
            self.0 = (self.0 ^ byte as u64).wrapping_mul(1099511628211);
        }
    }
}

/// Values in [-1, 1), made from their number.
struct Values(u32);
impl Values {
    fn tensor(&mut self, n: usize, heads: usize) -> Vec<f32> {
        let first = self.0;
        self.0 += (n * heads * DIM) as u32;
        (first..self.0)
            .map(|number| (number.wrapping_mul(2654435761) >> 8) as f32 / 8388608.0 - 1.0)
            .collect()
    }
}

/// n more tokens in every layer.
fn step(s: &mut Sequence, n: usize, values: &mut Values, hash: &mut Hash) -> kvq::Result<()> {
    for layer in 0..LAYERS {
        let (k, v) = (values.tensor(n, KV_HEADS), values.tensor(n, KV_HEADS));
        let q = values.tensor(n, Q_HEADS);
        let mut out = vec![0f32; n * Q_HEADS * DIM];
        s.prefill(
            layer,
            &Tensor::new(&k, n, KV_HEADS, DIM)?,
            &Tensor::new(&v, n, KV_HEADS, DIM)?,
            &Tensor::new(&q, n, Q_HEADS, DIM)?,
            &mut TensorMut::new(&mut out, n, Q_HEADS, DIM)?,
            AttendOptions::default(),
        )?;
        hash.add(&out);
    }
    Ok(())
}

fn run(keys: &str, values: &str, path: &Path) -> kvq::Result<u64> {
    let cache = Cache::new(&CacheOptions {
        values: Some(values.into()),
        ..CacheOptions::new(LAYERS, KV_HEADS, DIM, keys)
    })?;
    let (mut hash, mut made) = (Hash(14695981039346656037), Values(0));
    let mut more = |s: &mut Sequence, n| step(s, n, &mut made, &mut hash);
    let mut s = cache.new_sequence()?;
    for _ in 0..3 {
        more(&mut s, CHUNK)?;
    }
    for _ in 0..40 {
        more(&mut s, 1)?;
    }
    s.trim(330)?;
    let mut fork = s.fork()?;
    more(&mut fork, 5)?;
    s.save_file(path, "")?;
    let mut restored = cache.restore_file(path, None, false)?;
    more(&mut restored, 3)?;
    more(&mut s, 3)?;
    Ok(hash.0)
}

fn main() -> kvq::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    if let [keys, values, path] = &arguments[..] {
        println!(
            "{} {}: outputs {:016x}",
            keys,
            values,
            run(keys, values, Path::new(path))?
        );
    } else {
        std::process::exit(2);
    }
    Ok(())
}
