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
const PROMPT: usize = 300;
const DECODE: usize = 40;

/// FNV-1a, 64 bits.
struct Hash(u64);
impl Hash {
    fn add(&mut self, values: &[f32]) {
        for byte in values.iter().flat_map(|v| v.to_ne_bytes()) {
            self.0 = (self.0 ^ byte as u64).wrapping_mul(1099511628211);
        }
    }
}

/// A value in [-1, 1).
fn value(layer: usize, role: usize, token: usize, i: usize) -> f32 {
    let mut h = (((token * LAYERS + layer) * 3 + role) * 256 + i) as u32;
    h = h.wrapping_mul(2654435761);
    h = (h ^ (h >> 15)).wrapping_mul(2246822519);
    h ^= h >> 13;
    (h >> 8) as f32 / 8388608.0 - 1.0
}

fn values(layer: usize, role: usize, first: usize, n: usize, heads: usize) -> Vec<f32> {
    (first..first + n)
        .flat_map(|t| (0..heads * DIM).map(move |i| value(layer, role, t, i)))
        .collect()
}

/// n more tokens in every layer.
fn step(s: &mut Sequence, n: usize, hash: &mut Hash) -> kvq::Result<()> {
    let first = s.tokens(None)?;
    for layer in 0..LAYERS {
        let (k, v) = (
            values(layer, 0, first, n, KV_HEADS),
            values(layer, 1, first, n, KV_HEADS),
        );
        let q = values(layer, 2, first, n, Q_HEADS);
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
    let mut hash = Hash(14695981039346656037);
    let cache = Cache::new(&CacheOptions {
        values: Some(values.into()),
        ..CacheOptions::new(LAYERS, KV_HEADS, DIM, keys)
    })?;
    let mut s = cache.new_sequence()?;
    for _ in 0..PROMPT / CHUNK {
        step(&mut s, CHUNK, &mut hash)?;
    }
    for _ in 0..DECODE {
        step(&mut s, 1, &mut hash)?;
    }
    s.trim(PROMPT + 30)?;
    let mut fork = s.fork()?;
    for _ in 0..5 {
        step(&mut fork, 1, &mut hash)?;
    }
    s.save_file(path, "scenario")?;
    let mut restored = cache.restore_file(path, Some("scenario"), false)?;
    step(&mut restored, 3, &mut hash)?;
    step(&mut s, 3, &mut hash)?;
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
