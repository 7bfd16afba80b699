//! The safe wrapper: shapes, errors, options, lifetimes. Attention is tested in C++ and Python; here against double precision once.
use std::io::{self, Read, Write};

use kvq::*;

const KV: usize = 2;
const Q: usize = 4;
const D: usize = 32;

/// Values in [-1, 1), other ones for every seed.
fn values(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2654435761).wrapping_add(1);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) as f32 / 8388608.0 - 1.0
        })
        .collect()
}

fn options(keys: &str) -> CacheOptions {
    CacheOptions {
        page_tokens: Some(32),
        recent: Some(8),
        ..CacheOptions::new(2, KV, D, keys)
    }
}

fn filled(cache: &Cache, n: usize) -> Sequence {
    let mut s = cache.new_sequence().unwrap();
    for layer in 0..cache.info().unwrap().layers {
        let (k, v) = (values(layer as u32, n * KV * D), values(7 + layer as u32, n * KV * D));
        s.append(
            layer,
            &Tensor::new(&k, n, KV, D).unwrap(),
            &Tensor::new(&v, n, KV, D).unwrap(),
        )
        .unwrap();
    }
    s
}

fn attended(s: &Sequence, options: AttendOptions) -> Result<Vec<f32>> {
    let q = values(99, Q * D);
    let mut out = vec![0f32; Q * D];
    s.attend(
        0,
        &Tensor::new(&q, 1, Q, D)?,
        &mut TensorMut::new(&mut out, 1, Q, D)?,
        options,
    )?;
    Ok(out)
}

fn refused<T>(result: Result<T>, status: Status, text: &str) {
    match result {
        Ok(_) => panic!("not refused: {}", text),
        Err(e) => {
            assert_eq!(e.status(), status, "{}", e);
            assert!(
                e.to_string().starts_with("kvq: ") && e.to_string().contains(text),
                "{}",
                e
            );
        }
    }
}

#[test]
fn attention_in_double_precision() {
    let n = 70;
    let cache = Cache::new(&CacheOptions {
        window: Some("fp32".into()),
        ..options("fp32")
    })
    .unwrap();
    let s = filled(&cache, n);
    let (k, v, q) = (values(0, n * KV * D), values(7, n * KV * D), values(99, Q * D));
    let mut lse = [0f32; Q];
    let mods = Mods {
        window: Some(50),
        softcap: Some(3.0),
        ..Mods::default()
    };
    let out = attended(
        &s,
        AttendOptions {
            mods: Some(&mods),
            lse: Some(&mut lse),
            ..Default::default()
        },
    )
    .unwrap();
    for head in 0..Q {
        let of = head / (Q / KV);
        let (mut sum, mut expected) = (0.0, [0.0; D]);
        for t in n - 50..n {
            let at = (t * KV + of) * D;
            let dot: f64 = (0..D).map(|d| q[head * D + d] as f64 * k[at + d] as f64).sum();
            let weight = (3.0 * (dot / (D as f64).sqrt() / 3.0).tanh()).exp();
            sum += weight;
            for d in 0..D {
                expected[d] += weight * v[at + d] as f64;
            }
        }
        assert!((lse[head] as f64 - sum.ln()).abs() < 1e-5);
        for d in 0..D {
            assert!((out[head * D + d] as f64 - expected[d] / sum).abs() < 1e-5);
        }
    }
}

#[test]
fn lists_of_tokens() {
    let layers = vec![Layer::full_attention(1, 8), Layer::index(4)];
    let cache = Cache::new(&CacheOptions::of_layers(layers, "int8")).unwrap();
    let mut s = cache.new_sequence().unwrap();
    let mut keys = vec![0f32; 50 * 4];
    for t in 0..50 {
        keys[t * 4] = if t % 10 == 3 { t as f32 } else { -1.0 };
    }
    let values: Vec<f32> = (0..400).map(|i| (i / 8) as f32).collect();
    let same = Tensor::new(&values, 50, 1, 8).unwrap();
    s.append(0, &same, &same).unwrap();
    s.append(
        1,
        &Tensor::new(&keys, 50, 1, 4).unwrap(),
        &Tensor::<f32>::new(&[], 0, 1, 4).unwrap(),
    )
    .unwrap();
    let first = [1f32, 0.0, 0.0, 0.0];
    let q = Tensor::new(&first, 1, 1, 4).unwrap();
    let best = s.select(1, &q, &[1.0], 3, AttendOptions::default()).unwrap();
    assert_eq!(best, [43, 33, 23]);
    assert!(s.select(1, &q, &[1.0, 2.0], 3, AttendOptions::default()).is_err());
    assert!(s.select(1, &q, &[1.0], usize::MAX, AttendOptions::default()).is_err());
    let again = |weights| SelectRequest::new(&s, Tensor::new(&first, 1, 1, 4).unwrap(), weights);
    let all = cache.select(1, &[again(&[1.0]), again(&[2.0])], 3, AttendOptions::default());
    assert_eq!(all.unwrap(), [best.clone(), best.clone()]);
    let wrong = cache.select(1, &[again(&[1.0]), again(&[])], 3, AttendOptions::default());
    assert!(wrong.is_err());
    let mut mods = Mods {
        listed_tokens: vec![best[0]],
        list_queries: 1,
        ..Mods::default()
    };
    let (zeros, mut out) = ([0f32; 8], [0f32; 8]);
    let mut attend = |mods: &Mods| {
        s.attend(
            0,
            &Tensor::new(&zeros, 1, 1, 8).unwrap(),
            &mut TensorMut::new(&mut out, 1, 1, 8).unwrap(),
            AttendOptions {
                mods: Some(mods),
                ..Default::default()
            },
        )
        .map(|_| out[0])
    };
    assert!((attend(&mods).unwrap() - 43.0).abs() < 0.2);
    mods.listed_window = vec![1, 2];
    for wrong in [0, 2, usize::MAX] {
        mods.list_queries = wrong;
        mods.list_kv_heads = wrong;
        assert!(attend(&mods).is_err());
    }
    mods.list_queries = 1;
    mods.list_kv_heads = 1;
    assert!((attend(&mods).unwrap() - 46.0 / 3.0).abs() < 0.2);
}

#[test]
fn selection() {
    let cache = Cache::new(&options("kivi-4-g32")).unwrap();
    let s = filled(&cache, 500);
    let mods = Mods {
        selected_tokens: Some(64),
        skipped_mass: 0.3,
        ..Mods::default()
    };
    let (mut selection, mut skipping) = (SelectionReport::new(100).unwrap(), SkippingReport::default());
    let out = attended(
        &s,
        AttendOptions {
            mods: Some(&mods),
            selection: Some(&mut selection),
            skipping: Some(&mut skipping),
            ..Default::default()
        },
    )
    .unwrap();
    assert!(selection.read() < selection.pages() && selection.chosen().len() == selection.chosen_count());
    assert!(skipping.rows() == Q && skipping.most_left_out() <= 0.3 && skipping.left_out() < Q as f64);
    for head in 0..KV {
        let shown = Mods {
            token_ranges: selection
                .chosen()
                .iter()
                .filter(|r| r.kv_head == head as i32)
                .map(|r| r.tokens)
                .collect(),
            skipped_mass: 0.3,
            ..Mods::default()
        };
        let same = attended(
            &s,
            AttendOptions {
                mods: Some(&shown),
                ..Default::default()
            },
        )
        .unwrap();
        let of_head = head * D * Q / KV..(head + 1) * D * Q / KV;
        assert_eq!(same[of_head.clone()], out[of_head]);
    }
    let overlapping = Mods {
        token_ranges: vec![TokenRange { begin: 0, end: 5 }, TokenRange { begin: 3, end: 9 }],
        ..Mods::default()
    };
    let given = AttendOptions {
        mods: Some(&overlapping),
        ..Default::default()
    };
    refused(attended(&s, given), Status::Argument, "range 1 of tokens is [3, 9)");
}

#[test]
fn reserved_steps() {
    let cache = Cache::new(&CacheOptions {
        byte_budget: Some(1 << 20),
        preallocate: true,
        ..options("std4")
    })
    .unwrap();
    assert_eq!(cache.info().unwrap().bytes_held, 1 << 20);
    assert!(cache.footprint(100, &FootprintQuery::default()).unwrap().unused > 0);
    let (mut s, mut space) = (filled(&cache, 40), Workspace::new(0).unwrap());
    let n = 70;
    fn given(space: &mut Workspace) -> AttendOptions<'_> {
        AttendOptions {
            workspace: Some(space),
            ..Default::default()
        }
    }
    cache
        .reserve(&mut [StepRequest::new(&mut s, n, n)], Q, given(&mut space))
        .unwrap();
    let (held, scratch) = (cache.info().unwrap().bytes_in_use, space.bytes().unwrap());
    assert!(s.usage().unwrap().reserved > 0 && scratch > 0);
    let (k, q) = (values(1, n * KV * D), values(2, n * Q * D));
    let mut out = vec![0f32; n * Q * D];
    for layer in 0..2 {
        let of = Tensor::new(&k, n, KV, D).unwrap();
        s.prefill(
            layer,
            &of,
            &of,
            &Tensor::new(&q, n, Q, D).unwrap(),
            &mut TensorMut::new(&mut out, n, Q, D).unwrap(),
            given(&mut space),
        )
        .unwrap();
    }
    assert!(cache.info().unwrap().bytes_in_use <= held && space.bytes().unwrap() == scratch);
    assert_eq!(s.usage().unwrap().reserved, 0);
    cache
        .reserve(&mut [StepRequest::new(&mut s, 10, 1)], Q, given(&mut space))
        .unwrap();
    s.release_reserved().unwrap();
    assert_eq!(s.usage().unwrap().reserved, 0);
    let steps = &mut [StepRequest::new(&mut s, 100000, 0)];
    refused(
        cache.reserve(steps, Q, given(&mut space)),
        Status::Memory,
        "does not fit",
    );
    refused(
        cache.reserve(steps, Q, AttendOptions::default()),
        Status::Handle,
        "options.workspace",
    );
}

#[test]
fn tensors() {
    let mut x = vec![0f32; 100];
    refused(
        Tensor::new(&x, 2, 3, 17),
        Status::Argument,
        "has 102 values, in a slice of 100 values",
    );
    refused(
        Tensor::new(&x, usize::MAX, 3, 17),
        Status::Argument,
        "18446744073709551615 tokens",
    );
    refused(
        Tensor::strided(&x, [3, 2, 10], [40, 20]),
        Status::Argument,
        "with strides 40 and 20 ends outside",
    );
    refused(
        Tensor::strided(&x, [3, 2, 10], [usize::MAX, 20]),
        Status::Argument,
        "ends outside",
    );
    refused(
        Tensor::strided(&x, [3, 2, 10], [0, 0]),
        Status::Argument,
        "more than once",
    );
    assert!(Tensor::strided(&x, [5, 2, 10], [20, 10]).is_ok());
    assert!(Tensor::strided(&x, [5, 2, 10], [0, 10]).is_ok());
    assert!(Tensor::strided(&x, [0, 2, 10], [0, 0]).is_ok());
    refused(
        TensorMut::strided(&mut x, [5, 2, 10], [0, 10]).map(|_| ()),
        Status::Argument,
        "more than once",
    );
    refused(
        TensorMut::strided(&mut x, [5, 2, 10], [19, 10]).map(|_| ()),
        Status::Argument,
        "more than once",
    );
    refused(
        TensorMut::strided(&mut x, [5, 2, 10], [9, 50]).map(|_| ()),
        Status::Argument,
        "more than once",
    );
    assert!(TensorMut::strided(&mut x, [5, 2, 10], [10, 50]).is_ok());
    assert!(TensorMut::strided(&mut x, [1, 2, 10], [0, 10]).is_ok());

    // [heads][tokens][dim] has the bits of [tokens][heads][dim].
    let cache = Cache::new(&options("int8")).unwrap();
    let dense = filled(&cache, 10);
    let (k, v) = (values(0, 10 * KV * D), values(7, 10 * KV * D));
    let by_head = |x: &[f32]| -> Vec<f32> {
        (0..KV)
            .flat_map(|h| (0..10).flat_map(move |t| (0..D).map(move |d| (h, t, d))))
            .map(|(h, t, d)| x[(t * KV + h) * D + d])
            .collect()
    };
    let (k, v) = (by_head(&k), by_head(&v));
    let mut moved = cache.new_sequence().unwrap();
    let strides = [D, 10 * D];
    moved
        .append(
            0,
            &Tensor::strided(&k, [10, KV, D], strides).unwrap(),
            &Tensor::strided(&v, [10, KV, D], strides).unwrap(),
        )
        .unwrap();
    assert_eq!(
        attended(&moved, Default::default()).unwrap(),
        attended(&dense, Default::default()).unwrap()
    );
}

#[test]
fn sixteen_bits() {
    let cache = Cache::new(&options("int8")).unwrap();
    let (mut s, mut t) = (cache.new_sequence().unwrap(), cache.new_sequence().unwrap());
    let one = vec![F16(0x3c00); KV * D];
    let same = vec![Bf16(0x3f80); KV * D];
    s.append(
        0,
        &Tensor::new(&one, 1, KV, D).unwrap(),
        &Tensor::new(&one, 1, KV, D).unwrap(),
    )
    .unwrap();
    t.append(
        0,
        &Tensor::new(&same, 1, KV, D).unwrap(),
        &Tensor::new(&same, 1, KV, D).unwrap(),
    )
    .unwrap();
    assert_eq!(attended(&s, Default::default()).unwrap(), vec![1.0; Q * D]);
    assert_eq!(attended(&t, Default::default()).unwrap(), vec![1.0; Q * D]);
    let mut out = vec![F16(0); KV * D];
    s.dequantize(0, Role::Key, 0, &mut TensorMut::new(&mut out, 1, KV, D).unwrap())
        .unwrap();
    assert_eq!(out, one);
}

#[test]
fn errors() {
    refused(
        Cache::new(&options("std44")),
        Status::Argument,
        "no format \"std44\" for keys in this program; the nearest",
    );
    refused(Cache::new(&options("a\0b")), Status::Argument, "has a zero in it");
    refused(
        Cache::new(&CacheOptions {
            layers: 1 << 40,
            ..options("int8")
        }),
        Status::Argument,
        "layers is 1099511627776",
    );
    refused(
        Cache::new(&CacheOptions {
            byte_budget: Some(0),
            ..options("int8")
        }),
        Status::Argument,
        "byte_budget is 0",
    );
    let formats = vec![(None, None)];
    refused(
        Cache::new(&CacheOptions {
            layer_formats: formats,
            ..options("int8")
        }),
        Status::Argument,
        "1 entries for 2",
    );
    refused(Threads::new(0), Status::Argument, "at least 1 thread, got 0");

    let cache = Cache::new(&options("int8")).unwrap();
    let mut s = filled(&cache, 20);
    refused(
        s.trim(21),
        Status::Argument,
        "cannot trim to 21 tokens: the sequence holds 20",
    );
    refused(
        s.trim(1 << 32),
        Status::Argument,
        "tokens is 4294967296, more than 2147483647",
    );
    refused(s.erase(0, 5), Status::Argument, "keys cannot move");
    refused(s.tokens(Some(2)), Status::Argument, "2");
    refused(s.keep(&[1]), Status::Argument, "draft");
    let k = values(1, 3 * D);
    refused(
        s.append(
            0,
            &Tensor::new(&k, 1, 3, D).unwrap(),
            &Tensor::new(&k, 1, 3, D).unwrap(),
        ),
        Status::Argument,
        "k is 3 heads x 32 channels but the cache holds 2 x 32",
    );
    let mut lse = [0f32; 3];
    refused(
        attended(
            &s,
            AttendOptions {
                lse: Some(&mut lse),
                ..Default::default()
            },
        ),
        Status::Argument,
        "lse has 3 values",
    );
    let mods = Mods {
        scale: Some(0.0),
        ..Mods::default()
    };
    refused(
        attended(
            &s,
            AttendOptions {
                mods: Some(&mods),
                ..Default::default()
            },
        ),
        Status::Argument,
        "scale is 0",
    );
    let mods = Mods {
        alibi_slopes: vec![1.0; 3],
        ..Mods::default()
    };
    refused(
        attended(
            &s,
            AttendOptions {
                mods: Some(&mods),
                ..Default::default()
            },
        ),
        Status::Argument,
        "3 slopes",
    );
    let other = Cache::new(&options("int8")).unwrap();
    refused(s.splice(&filled(&other, 3), 0, 3), Status::Handle, "another cache");
    refused(
        other.requantize(&mut [&mut s], &Requantize::default()),
        Status::Handle,
        "another cache",
    );
    let request = Requantize {
        layers: Some((1, 1)),
        ..Default::default()
    };
    refused(
        cache.plan_requantize(&[&s], &request),
        Status::Argument,
        "layers [1, 1) are none",
    );
    assert_eq!(s.tokens(None).unwrap(), 20);

    let small = Cache::new(&CacheOptions {
        byte_budget: Some(100_000),
        ..options("fp16")
    })
    .unwrap();
    let used = small.info().unwrap().bytes_in_use;
    let k = values(1, 4000 * KV * D);
    let k = Tensor::new(&k, 4000, KV, D).unwrap();
    refused(
        small.new_sequence().unwrap().append(0, &k, &k),
        Status::Memory,
        "100000",
    );
    assert_eq!(small.info().unwrap().bytes_in_use, used);
}

#[test]
fn sequences() {
    let rotary = vec![Rotary::new(D, 10000.0)];
    let cache = Cache::new(&CacheOptions {
        rotary,
        ..options("std4,low2")
    })
    .unwrap();
    let mut s = filled(&cache, 150);
    let before = attended(&s, Default::default()).unwrap();
    let mut f = s.fork().unwrap();
    f.trim(100).unwrap();
    f.erase(10, 20).unwrap();
    f.shift(0, 90, 5).unwrap();
    f.splice(&s, 0, 7).unwrap();
    assert_eq!((s.tokens(None).unwrap(), f.tokens(Some(1)).unwrap()), (150, 97));
    assert_eq!(attended(&s, Default::default()).unwrap(), before);

    let mut threads = Threads::new(3).unwrap();
    let mut workspace = Workspace::new(cache.workspace_bytes(150, Q, 1, 3).unwrap()).unwrap();
    let size = workspace.bytes().unwrap();
    let options = AttendOptions {
        threads: Some(&mut threads),
        workspace: Some(&mut workspace),
        ..Default::default()
    };
    assert_eq!(attended(&s, options).unwrap(), before);
    assert_eq!(workspace.bytes().unwrap(), size);

    let request = || Requantize {
        keys: Some("low2"),
        values: Some("low2"),
        ..Default::default()
    };
    let plan = cache.plan_requantize(&[&s, &f], &request()).unwrap();
    let done = cache
        .requantize(
            &mut [&mut s, &mut f],
            &Requantize {
                threads: Some(&mut threads),
                ..request()
            },
        )
        .unwrap();
    assert!(plan.pages > 0 && plan.bytes_after < plan.bytes_before);
    assert_eq!((done.pages, done.bytes_after), (plan.pages, plan.bytes_after));
    let tier = Tier {
        age: 16,
        keys: Some("low2".into()),
        values: None,
    };
    let policy = StepDownPolicy {
        tiers: vec![tier],
        ..Default::default()
    };
    let plan = cache.plan_step_down(&[&s], &policy, None).unwrap();
    let done = cache.step_down(&mut [&mut s], &policy, None).unwrap();
    assert!(done.fits);
    assert_eq!((plan.pages, plan.bytes_after), (done.pages, done.bytes_after));
    let usage = s.usage().unwrap();
    assert_eq!((usage.tokens, usage.not_finite), (150, 0));
    assert!(s.append_bytes(100).unwrap() > 0 && s.prefill_bytes(100).unwrap() > 0 && s.draft_bytes(64).unwrap() > 0);
}

#[test]
fn plans_of_keys() {
    let quantized = |key_statistics, statistics_tokens| {
        let cache = Cache::new(&CacheOptions {
            key_statistics,
            statistics_tokens,
            ..options("low2")
        })?;
        filled(&cache, 150).usage().map(|usage| usage.quantized)
    };
    assert_eq!(quantized(KeyStatistics::default(), None).unwrap(), 0);
    assert_eq!(quantized(KeyStatistics::Shared, Some(151)).unwrap(), 0);
    assert!(quantized(KeyStatistics::Own, Some(64)).unwrap() > 0);
    assert!(quantized(KeyStatistics::Shared, Some(64)).unwrap() > 0);
    assert!(quantized(KeyStatistics::Off, None).unwrap() > 0);
    refused(
        quantized(KeyStatistics::Own, Some(63)),
        Status::Argument,
        "must be between 64 and",
    );
}

#[test]
fn batches() {
    let cache = Cache::new(&options("std4")).unwrap();
    let mut alone = [filled(&cache, 40), filled(&cache, 90)];
    let mut together: Vec<_> = alone.iter().map(|s| s.fork().unwrap()).collect();
    let (x, q) = (values(5, KV * D), values(6, Q * D));
    let (k, q) = (Tensor::new(&x, 1, KV, D).unwrap(), Tensor::new(&q, 1, Q, D).unwrap());
    let mods = Mods {
        window: Some(9),
        ..Mods::default()
    };
    let (mut outs, mut lse) = (vec![vec![0f32; Q * D]; 2], [0f32; Q]);
    {
        let mut requests: Vec<_> = together
            .iter_mut()
            .zip(outs.iter_mut())
            .map(|(s, out)| PrefillRequest::new(s, k, k, q, TensorMut::new(out, 1, Q, D).unwrap()))
            .collect();
        let last = requests.pop().unwrap().mods(&mods).lse(&mut lse);
        requests.push(last);
        cache.prefill(0, &mut requests, AttendOptions::default()).unwrap();
    }
    for (i, s) in alone.iter_mut().enumerate() {
        let (mut out, mut own) = (vec![0f32; Q * D], [0f32; Q]);
        let options = AttendOptions {
            mods: if i == 1 { Some(&mods) } else { None },
            lse: Some(&mut own),
            ..Default::default()
        };
        s.prefill(0, &k, &k, &q, &mut TensorMut::new(&mut out, 1, Q, D).unwrap(), options)
            .unwrap();
        assert_eq!(out, outs[i]);
        assert!(i == 0 || own == lse);
    }
    let mut again = vec![vec![0f32; Q * D]; 2];
    {
        let mut requests: Vec<_> = together
            .iter()
            .zip(again.iter_mut())
            .map(|(s, out)| AttendRequest::new(s, q, TensorMut::new(out, 1, Q, D).unwrap()))
            .collect();
        cache
            .attend(
                0,
                &mut requests,
                AttendOptions {
                    mods: Some(&mods),
                    ..Default::default()
                },
            )
            .unwrap();
    }
    assert_ne!(again[0], outs[0]);
    assert_eq!(again[1], outs[1]);
}

struct Broken;
impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::new(io::ErrorKind::BrokenPipe, "gone"))
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        panic!("of the reader");
    }
}

#[test]
fn files() {
    let cache = Cache::new(&options("std4")).unwrap();
    let s = filled(&cache, 77);
    let mut data = Vec::new();
    s.save(&mut data, "m").unwrap();
    let restored = cache.restore(&mut &data[..], Some("m"), false).unwrap();
    assert_eq!(
        attended(&restored, Default::default()).unwrap(),
        attended(&s, Default::default()).unwrap()
    );
    refused(
        cache.restore(&mut &data[..data.len() - 1], None, false),
        Status::Data,
        "",
    );
    refused(cache.restore(&mut &data[..], Some("n"), false), Status::Data, "");
    refused(
        cache.restore_file("/no such/file".as_ref(), None, false),
        Status::Data,
        "/no such/file",
    );
    let mut without = s.fork().unwrap();
    assert!(s.usage().unwrap().rollback > 0);
    without.drop_copies().unwrap();
    assert_eq!(without.usage().unwrap().rollback, 0);
    refused(s.save(&mut Broken, "m"), Status::Callback, "the writer failed: gone");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cache.restore(&mut Broken, None, false)));
    assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"of the reader"));

    let mut receiver = Receiver::new(&cache).unwrap();
    for layer in (0..2).rev() {
        for message in s.send_pages(layer).unwrap() {
            receiver.accept(&message).unwrap();
        }
    }
    let received = receiver.finish(Some(77)).unwrap();
    assert_eq!(
        attended(&received, Default::default()).unwrap(),
        attended(&s, Default::default()).unwrap()
    );
    refused(receiver.accept(&[1, 2, 3]), Status::Data, "");

    let other = Cache::new(&options("low2,std4")).unwrap();
    let mut receiver = Receiver::new(&other).unwrap();
    receiver.convert_pages(None, None, None).unwrap();
    for layer in 0..2 {
        for message in s.send_pages(layer).unwrap() {
            receiver.accept(&message).unwrap();
        }
    }
    let converted = receiver.finish(None).unwrap();
    assert!(converted.usage().unwrap().quantized < s.usage().unwrap().quantized);

    let mut wide = options("std4,low2");
    wide.page_tokens = Some(48);
    let other = Cache::new(&wide).unwrap();
    let mut receiver = Receiver::new(&other).unwrap();
    receiver.convert_pages(None, None, Some(32)).unwrap();
    for layer in 0..2 {
        for message in s.send_pages(layer).unwrap() {
            receiver.accept(&message).unwrap();
        }
    }
    assert_eq!(receiver.finish(Some(77)).unwrap().usage().unwrap().tokens, 77);
}

#[test]
fn rings_and_prefixes() {
    let cache = Cache::new(&options("std4,low2")).unwrap();
    let s = filled(&cache, 150);
    let mut ring = Ring::new(
        &s,
        &RingOptions {
            window: 20,
            ..Default::default()
        },
    )
    .unwrap();
    assert_eq!(ring.tokens(None).unwrap().0, 150);
    let x = values(5, 60 * KV * D);
    let k = Tensor::new(&x, 60, KV, D).unwrap();
    for layer in 0..2 {
        ring.append(layer, &k, &k).unwrap();
    }
    let (tokens, first) = ring.fork().unwrap().tokens(Some(0)).unwrap();
    assert!(tokens == 210 && first > 0);
    assert!(ring.held().unwrap().tokens(None).unwrap() < 210);
    ring.trim(205).unwrap();
    refused(ring.trim(0), Status::Argument, "0");

    let store = PrefixCache::new(
        &cache,
        &PrefixCacheOptions {
            min_prefix_tokens: Some(10),
            ..Default::default()
        },
    )
    .unwrap();
    let text: Vec<i32> = (0..150).collect();
    assert_eq!(store.store(&text, &s).unwrap(), Outcome::Stored);
    assert_eq!(store.store(&text, &s).unwrap(), Outcome::Duplicate);
    let (got, found) = store.fetch(&text[..100]).unwrap();
    assert_eq!(
        (got.tokens(None).unwrap(), found),
        (
            100,
            Match {
                kind: MatchKind::Supersequence,
                tokens: 100
            }
        )
    );
    assert_eq!(store.lookup(&[1, 2]).unwrap().kind, MatchKind::Miss);
    assert_eq!(store.statistics().unwrap().entries, 1);
    assert!(store.erase(&text).unwrap() && !store.erase(&text).unwrap());
}

#[test]
fn formats_and_statistics() {
    assert!(formats()
        .unwrap()
        .iter()
        .any(|f| f.name == "std4" && f.preset && f.keys));
    let f = Format::find("affine-4-g64", Role::Key).unwrap();
    let d = f.describe(128, 128).unwrap();
    assert_eq!((d.bits, d.block_bytes, d.holds_values), (4.5, 9216, false));
    assert_eq!(d.asked_name, "affine-4-g64");
    let x = values(3, 32 * KV * D);
    let page = f.quantize(&Tensor::new(&x, 32, KV, D).unwrap(), 0, 0).unwrap();
    let mut y = vec![0f32; x.len()];
    f.dequantize(&page, &mut TensorMut::new(&mut y, 32, KV, D).unwrap(), 0, 0)
        .unwrap();
    assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 0.1));
    refused(
        f.dequantize(&page[1..], &mut TensorMut::new(&mut y, 32, KV, D).unwrap(), 0, 0),
        Status::Argument,
        "bytes, not",
    );
    refused(Format::find("int9", Role::Key).map(|_| ()), Status::Argument, "int9");

    let mut sums = Statistics::new(2, KV, D, true).unwrap();
    let x = values(3, 128 * KV * D);
    for layer in 0..2 {
        sums.add_keys(layer, &Tensor::new(&x, 128, KV, D).unwrap()).unwrap();
        sums.add_queries(layer, &Tensor::new(&x, 128, KV, D).unwrap()).unwrap();
    }
    let mut data = Vec::new();
    sums.save(&mut data).unwrap();
    let loaded = Statistics::load(&data).unwrap();
    let cache = Cache::with_statistics(&options("low2"), &loaded).unwrap();
    filled(&cache, 100);
    refused(Statistics::load(&data[..9]), Status::Data, "");

    let query = FootprintQuery {
        q_heads: Q,
        ..Default::default()
    };
    let longest = cache.longest_context(1_000_000, &query).unwrap().unwrap();
    assert!(cache.footprint(longest, &query).unwrap().total <= 1_000_000);
    assert_eq!(cache.longest_context(0, &query).unwrap(), None);
    let options = CacheOptions::new(2, 2, 32, "int8");
    let asked = BudgetQuery {
        tokens: 300,
        chunk: 64,
        ..Default::default()
    };
    let budget = Cache::budget(&options, &asked).unwrap();
    let three = BudgetQuery {
        sequences: 3,
        ..asked.clone()
    };
    assert_eq!(Cache::budget(&options, &three).unwrap(), 3 * budget);
    let cut = BudgetQuery { cuts: 1, ..asked };
    assert!(Cache::budget(&options, &cut).unwrap() > budget);
    assert!(Rotary::llama3(D, 500000.0, 8.0, 1.0, 4.0, 8192.0).unwrap().frequencies[0] == 1.0);
    assert!(Rotary::yarn(D, 10000.0, 4.0, 2048.0, 32.0, 1.0).is_ok());
}

#[test]
fn layers() {
    let cache = |layer_list| {
        Cache::new(&CacheOptions {
            page_tokens: Some(32),
            recent: Some(8),
            snapshot_every: Some(64),
            ..CacheOptions::of_layers(layer_list, "int8")
        })
    };
    let append = |s: &mut Sequence, layer: usize, n: usize, dim: usize| {
        let x = values(layer as u32, n * dim);
        let x = Tensor::new(&x, n, 1, dim).unwrap();
        s.append(layer, &x, &x).unwrap();
    };
    let parts = vec![
        StatePart {
            snapshot: SnapshotType::Int8Columns,
            ..StatePart::new("recurrent", 2, 4, 8)
        },
        StatePart {
            dtype: DataType::Bf16,
            ..StatePart::new("conv", 1, 3, 5)
        },
    ];
    let list = vec![
        Layer::full_attention(1, 64),
        Layer::sliding_attention(64, 1, 32),
        Layer::state(parts),
    ];
    let of = cache(list.clone()).unwrap();
    assert_eq!((of.info().unwrap().layers, of.info().unwrap().head_dim), (3, 0));
    let mut s = of.new_sequence().unwrap();
    for n in [64, 64, 64, 8] {
        append(&mut s, 0, n, 64);
        append(&mut s, 1, n, 32);
        let at = s.tokens(Some(2)).unwrap();
        s.state::<f32>(2, 0).unwrap().iter_mut().for_each(|x| *x += 1.0);
        s.state::<Bf16>(2, 1).unwrap()[14].0 = at as u16;
        assert_eq!(s.advance(n, false, None).unwrap(), n == 64);
    }
    let (usage, plan) = (
        s.usage().unwrap(),
        of.footprint(200, &FootprintQuery::default()).unwrap(),
    );
    assert!(usage.state > 0 && usage.tokens == 200 && plan.quantized == usage.quantized);
    let tokens: Vec<_> = s.snapshots().unwrap().iter().map(|x| x.tokens).collect();
    assert_eq!(tokens, [64, 128, 192]);
    assert_eq!(s.trim_limit().unwrap(), 192);
    refused(
        s.trim(191),
        Status::Argument,
        "cannot trim to 128 tokens: layer 1, sliding window of 64",
    );
    let other = s.fork().unwrap();
    let reached = s.reach(198).unwrap();
    assert_eq!((reached, s.trim(198).unwrap(), s.tokens(None).unwrap()), (192, 6, 192));
    assert!(s.state::<f32>(2, 0).unwrap().iter().all(|x| (x - 3.0).abs() < 0.01));
    assert_eq!(s.state::<Bf16>(2, 1).unwrap()[14], Bf16(128));
    assert_eq!(other.tokens(Some(2)).unwrap(), 200);
    s.advance(1, false, Some(&mut Threads::new(2).unwrap())).unwrap();
    s.snapshot(None).unwrap();
    assert_eq!(s.snapshots().unwrap().last().unwrap().tokens, 193);
    s.drop_snapshots().unwrap();
    assert!(s.snapshots().unwrap().is_empty());

    refused(s.state::<f32>(0, 0), Status::Argument, "layer 0 has no state");
    refused(
        s.state::<f32>(2, 2),
        Status::Argument,
        "layer 2 has no part 2: it has 2",
    );
    refused(s.state::<f32>(2, 1), Status::Argument, "part 1 of layer 2 has 30 bytes");
    refused(
        cache(vec![Layer::chunked_attention(0, 1, 32)]),
        Status::Argument,
        "layer 0, chunks of 0",
    );
    refused(
        cache(vec![Layer::state(vec![])]),
        Status::Argument,
        "layer 0, state of 0 parts",
    );
    let both = CacheOptions {
        layer_list: list,
        ..CacheOptions::new(3, 1, 64, "int8")
    };
    refused(
        Cache::new(&both),
        Status::Argument,
        "layers is 3, not 0, beside a layer_list",
    );
    let shaped = CacheOptions { layers: 0, ..both };
    refused(Cache::new(&shaped), Status::Argument, "must be 0, not 1, 64 and 0");
}

#[test]
fn lifetimes_and_threads() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<Cache>();
    is_sync::<Cache>();
    is_send::<Sequence>();
    is_sync::<Sequence>();

    let cache = Cache::new(&options("std4")).unwrap();
    let s = filled(&cache, 100);
    let f = s.fork().unwrap();
    let before = attended(&s, Default::default()).unwrap();
    drop(s);
    let store = PrefixCache::new(&cache, &Default::default()).unwrap();
    drop(cache);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let (own, before) = (f.fork().unwrap(), before.clone());
            std::thread::spawn(move || {
                for _ in 0..10 {
                    assert_eq!(attended(&own, Default::default()).unwrap(), before);
                }
            })
        })
        .collect();
    assert_eq!(attended(&f, Default::default()).unwrap(), before);
    workers.into_iter().for_each(|w| w.join().unwrap());
    drop(store);
    assert_eq!(version().split('.').count(), 3);
}

#[test]
fn tokens_dropped_head_by_head() {
    let cache = Cache::new(&CacheOptions {
        sinks: Some(2),
        ..options("int8")
    })
    .unwrap();
    let mut s = filled(&cache, 100);
    let q = values(99, Q * D);
    let mass = s
        .attention_mass(0, &Tensor::new(&q, 1, Q, D).unwrap(), AttendOptions::default())
        .unwrap();
    assert_eq!(mass.len(), KV * 100);
    let sum: f32 = mass.iter().sum();
    assert!((sum - Q as f32).abs() < 1e-3, "{}", sum);
    let kept: Vec<i32> = (0..KV)
        .flat_map(|h| (0..50).map(move |i| if i < 2 { i } else { 50 + i - h as i32 }))
        .collect();
    refused(s.retain(0, &kept, 49), Status::Argument, "100 positions for 2 kv heads");
    refused(s.retain(2, &kept, 50), Status::Argument, "layer 2 is not among");
    s.retain(0, &kept, 50).unwrap();
    assert_eq!((s.gap(0).unwrap(), s.gap(1).unwrap()), ((2, 52), (2, 2)));
    assert_eq!(s.tokens(Some(0)).unwrap(), 100);
    assert!(attended(&s, AttendOptions::default())
        .unwrap()
        .iter()
        .all(|x| x.is_finite()));
    // What is held stays 16 bit until it is released.
    let mut held = cache.new_sequence().unwrap();
    held.hold().unwrap();
    let (k, v) = (values(1, 100 * KV * D), values(2, 100 * KV * D));
    for layer in 0..2 {
        held.append(
            layer,
            &Tensor::new(&k, 100, KV, D).unwrap(),
            &Tensor::new(&v, 100, KV, D).unwrap(),
        )
        .unwrap();
    }
    assert_eq!(held.usage().unwrap().quantized, 0);
    held.release().unwrap();
    assert!(held.usage().unwrap().quantized > 0);
}

#[test]
fn rows_of_another_system() {
    // fp8: 0x38 is 1, so all values are the scale.
    let (blocks, tokens) = (3, 8);
    let data = vec![0x38u8; blocks * tokens * KV * D];
    let shape = [blocks, tokens, KV];
    let (keys, of_values) = (
        Rows::new("fp8", &data, shape, 1.0).unwrap(),
        Rows::new("fp8", &data, shape, 0.5).unwrap(),
    );
    let q = values(99, Q * D);
    let mut out = vec![0f32; Q * D];
    let mut attend = |tokens: usize, table: Option<&[i32]>, dim: usize| {
        attend_rows(
            &keys,
            &of_values,
            tokens,
            table,
            &Tensor::new(&q[..Q * dim], 1, Q, dim)?,
            &mut TensorMut::new(&mut out[..Q * dim], 1, Q, dim)?,
            AttendOptions::default(),
        )
    };
    attend(20, Some(&[2, 0, 1]), D).unwrap();
    refused(attend(25, None, D), Status::Argument, "25");
    refused(attend(20, Some(&[2, 0, 3]), D), Status::Argument, "3");
    refused(
        attend(20, None, 16),
        Status::Argument,
        "keys have 32 bytes, 0 of scales and 0 of biases a token and head, but 16 channels take 16, 0 and 0",
    );
    assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-6));
    refused(
        Rows::new("fp8", &data[1..], shape, 1.0),
        Status::Argument,
        "no whole rows of 3 blocks",
    );
    refused(Rows::new("std4", &data, shape, 1.0), Status::Argument, "std4");
    let short = vec![0u8; blocks * tokens * KV * D / 2];
    let scales = vec![0x38u8; blocks * tokens * KV * D / 16];
    let packed = Rows::with_scales("nvfp4", &short, &scales, shape, 1.0).unwrap();
    attend_rows(
        &packed,
        &packed,
        24,
        None,
        &Tensor::new(&q, 1, Q, D).unwrap(),
        &mut TensorMut::new(&mut out, 1, Q, D).unwrap(),
        AttendOptions::default(),
    )
    .unwrap();
    assert!(out.iter().all(|x| *x == 0.0));
    // MLX: 2-bit codes 2 of scale 0.5 and bias 0.25, two groups of 64 channels.
    let rows = blocks * tokens * KV;
    let (codes, halves) = (vec![0xaau8; rows * 32], [0x00u8, 0x38].repeat(rows * 2));
    let biases = [0x00u8, 0x34].repeat(rows * 2);
    let of_mlx = Rows::with_biases("mlx-2-g64", &codes, &halves, &biases, shape).unwrap();
    let (q, mut out) = (vec![0.5f32; Q * 128], vec![0f32; Q * 128]);
    attend_rows(
        &of_mlx,
        &of_mlx,
        24,
        None,
        &Tensor::new(&q, 1, Q, 128).unwrap(),
        &mut TensorMut::new(&mut out, 1, Q, 128).unwrap(),
        AttendOptions::default(),
    )
    .unwrap();
    assert!(out.iter().all(|x| (x - 1.25).abs() < 1e-6));
    refused(
        Rows::with_biases("mlx-2-g64", &codes, &halves, &biases[..rows * 2], shape),
        Status::Argument,
        "4 bytes of scales and 2 of biases",
    );
}
