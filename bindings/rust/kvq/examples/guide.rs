//! A prompt, decode steps, a fork, a saved file. Numbers of no meaning stand for the tensors of a model.
use kvq::{AttendOptions, Cache, CacheOptions, FootprintQuery, Mods, Rotary, Sequence, Tensor, TensorMut, Threads};

const LAYERS: usize = 4;
const KV_HEADS: usize = 2;
const Q_HEADS: usize = 8;
const HEAD_DIM: usize = 64;

/// Keys, values or queries of a layer, [tokens][heads][dim]; keys and queries rotated.
fn projected(seed: usize, tokens: usize, heads: usize) -> Vec<f32> {
    (0..tokens * heads * HEAD_DIM)
        .map(|i| ((i * 31 + seed * 17) as f32).sin())
        .collect()
}

/// Appends tokens to every layer and attends for all of them.
fn forward(sequence: &mut Sequence, n: usize, mods: Option<&Mods>, threads: &mut Threads) -> kvq::Result<Vec<f32>> {
    let mut out = vec![0f32; n * Q_HEADS * HEAD_DIM];
    for layer in 0..LAYERS {
        let (k, v) = (projected(layer, n, KV_HEADS), projected(layer + 100, n, KV_HEADS));
        let q = projected(layer + 200, n, Q_HEADS);
        sequence.prefill(
            layer,
            &Tensor::new(&k, n, KV_HEADS, HEAD_DIM)?,
            &Tensor::new(&v, n, KV_HEADS, HEAD_DIM)?,
            &Tensor::new(&q, n, Q_HEADS, HEAD_DIM)?,
            &mut TensorMut::new(&mut out, n, Q_HEADS, HEAD_DIM)?,
            AttendOptions {
                mods,
                threads: Some(threads),
                ..AttendOptions::default()
            },
        )?;
    }
    Ok(out)
}

fn main() -> kvq::Result<()> {
    let cache = Cache::new(&CacheOptions {
        rotary: vec![Rotary::new(HEAD_DIM, 10000.0)],
        ..CacheOptions::new(LAYERS, KV_HEADS, HEAD_DIM, "std4")
    })?;
    let planned = cache.footprint(32768, &FootprintQuery::default())?;
    println!("32768 tokens will take {:.1} MB", planned.total as f64 / 1e6);

    let mut sequence = cache.new_sequence()?;
    let mut threads = Threads::new(2)?;
    for _ in 0..4 {
        forward(&mut sequence, 256, None, &mut threads)?; // the prompt in chunks
    }
    for _ in 0..16 {
        forward(&mut sequence, 1, None, &mut threads)?; // a decode step
    }
    println!("{} tokens in {} bytes", sequence.tokens(None)?, sequence.usage()?.bytes);

    let mut other = sequence.fork()?; // shares all pages
    other.trim(1030)?; // another answer to the same prompt
    let window = Mods {
        window: Some(512),
        ..Mods::default()
    };
    forward(&mut other, 1, Some(&window), &mut threads)?;
    other.erase(100, 200)?; // the tokens behind move to the front

    let mut file = Vec::new();
    sequence.save(&mut file, "my model")?;
    let restored = cache.restore(&mut &file[..], Some("my model"), false)?;
    assert_eq!(restored.tokens(None)?, sequence.tokens(None)?);

    if let Err(e) = sequence.trim(2000) {
        println!("{}", e);
    }
    Ok(())
}
