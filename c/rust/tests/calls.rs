//! Against the broker of LAYERZERO_RUNTIME_DIR, whose backends are those of tests/backends. `make test` runs this from
//! tests/c/test_rust.py.

use layerzero::{sys, Bundle, Call, Client, Dtype, Options, Retry};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::Duration;

fn options() -> Options {
    Options { libzmq: std::env::var("LZ_TEST_LIBZMQ").ok(), ..Options::default() }
}

fn client() -> Client {
    Client::connect(&options()).expect("a broker runs")
}

/// The first element of silu's input that makes backends do things (tests/backends/toy.py).
fn fault(name: &str) -> f32 {
    std::env::var(name).expect("tests/c/test_rust.py says it").parse().expect("a number")
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

#[test]
fn results_are_right_and_reported() {
    let client = client();
    let x = client.block(&[-2.0f32, -1.0, 0.0, 1.0, 2.0, 3.0]).unwrap();
    let mut y = client.zeros::<f32>(6).unwrap();
    let call =
        Call::new("silu").input(x.tensor(&[2, 3])).output(y.tensor_mut(&[2, 3])).timeout(Duration::from_secs(60));
    let report = call.run(&client).unwrap();
    assert!(x.iter().zip(y.iter()).all(|(x, y)| (silu(*x) - y).abs() < 1e-6));
    assert!(report.kernel_id.ends_with(".silu") && report.attempt == 1 && report.candidates[0].is_accepted);
    assert!(report.candidates.iter().any(|one| !one.is_accepted && !one.reasons[0].code.is_empty()));

    let a = client.block(&[1.0f64, 2.0, 3.0, 4.0]).unwrap();
    let mut product = client.zeros::<f64>(4).unwrap();
    let turned = a.tensor(&[2, 2]).strided(&[1, 2]);
    Call::new("matmul")
        .input(a.tensor(&[2, 2]))
        .input(turned)
        .output(product.tensor_mut(&[2, 2]))
        .run(&client)
        .unwrap();
    assert_eq!(&product[..], &[5.0, 11.0, 11.0, 25.0]);

    let half = client.block(&[0x3F80u16, 0xC000]).unwrap(); // 1 and -2 in bfloat16
    let mut out = client.zeros::<u16>(2).unwrap();
    let output = out.tensor_mut(&[2]).typed(Dtype::BFloat16);
    Call::new("silu").input(half.tensor(&[2]).typed(Dtype::BFloat16)).output(output).run(&client).unwrap();
    assert!((f32::from_bits(u32::from(out[0]) << 16) - silu(1.0)).abs() < 0.01);
}

#[test]
fn a_call_that_is_made_again_takes_a_lane() {
    let client = client();
    let x = client.block(&[-2.0f32, 3.0]).unwrap();
    let mut y = client.zeros::<f32>(2).unwrap();
    let mut path = String::new();
    while path != "express" {
        y.fill(0.0);
        path = Call::new("silu").input(x.tensor(&[2])).output(y.tensor_mut(&[2])).run(&client).unwrap().path;
        assert!((silu(-2.0) - y[0]).abs() < 1e-6 && (silu(3.0) - y[1]).abs() < 1e-6);
    }
}

#[test]
fn ops_that_write_in_place_have_one_tensor_for_both() {
    let client = client();
    let key = client.block(&[1.0f32, 2.0]).unwrap();
    let slots = client.block(&[2i64]).unwrap();
    let (mut k, mut v) = (client.zeros::<f32>(8).unwrap(), client.zeros::<f32>(8).unwrap());
    let token = || key.tensor(&[1, 1, 2]);
    let call = Call::new("append_kv").input(token()).input(token());
    let call = call.updated(k.tensor_mut(&[2, 2, 1, 2])).updated(v.tensor_mut(&[2, 2, 1, 2]));
    call.input(slots.tensor(&[1])).no_input().no_input().run(&client).unwrap(); // no scales
    assert_eq!((&k[..], &v[4..6]), (&[0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0][..], &[1.0, 2.0][..]));
}

#[test]
fn a_worker_that_dies_is_an_attempt() {
    let client = client();
    let x = client.block(&[fault("LZ_TEST_KILL"), 1.0]).unwrap();
    let mut y = client.zeros::<f32>(2).unwrap();
    let report = Call::new("silu").input(x.tensor(&[2])).output(y.tensor_mut(&[2])).run(&client).unwrap();
    let attempt = &report.attempts[0];
    assert_eq!((attempt.backend.as_str(), attempt.code.as_str()), ("alpha", "BACKEND_ERROR"));
    assert_eq!((attempt.exit_signal, attempt.exit_code, attempt.phase.as_str()), (Some(9), None, "executing"));
    assert!((y[1] - silu(1.0)).abs() < 1e-6);
}

#[test]
fn errors_say_what_to_do() {
    let client = client();
    let x = client.block(&[1.0f32, 2.0]).unwrap();
    let mut y = client.zeros::<f32>(2).unwrap();
    let error = Call::new("sillu").input(x.tensor(&[2])).output(y.tensor_mut(&[2])).run(&client).unwrap_err();
    assert_eq!((error.code.as_str(), error.retry), ("INVALID_ARGUMENT", Retry::Never));
    assert!(error.to_string().starts_with("INVALID_ARGUMENT: Correct the call"));
    let error = Call::new("si\0lu").run(&client).unwrap_err();
    assert!(error.message.starts_with("Take the zero byte out"));
    let error = Call::new("silu").input(x.tensor(&[3])).output(y.tensor_mut(&[3])).run(&client).unwrap_err();
    assert!(error.message.contains("pass the block's end"));
    let call = Call::new("silu").attr("eps", 1e-5).input(x.tensor(&[2])).output(y.tensor_mut(&[2]));
    assert_eq!(call.run(&client).unwrap_err().code, "INVALID_ARGUMENT");
    let call = Call::new("silu").backend("jax-cuda").input(x.tensor(&[2])).output(y.tensor_mut(&[2]));
    let error = call.run(&client).unwrap_err();
    assert_eq!(error.code, "NO_BACKEND");
    assert!(error.report.is_some());
    let nowhere = Options { runtime_dir: Some("/nonexistent/layerzero".to_string()), ..options() };
    let error = Client::connect(&nowhere).err().unwrap();
    assert_eq!(error.code, "NOT_CONNECTED");
    assert!(error.message.contains("`lz up`"));
}

#[test]
fn memory_of_another_client_is_refused() {
    let (ours, theirs) = (client(), client());
    let x = theirs.block(&[1.0f32]).unwrap();
    let mut y = ours.zeros::<f32>(1).unwrap();
    let error = Call::new("silu").input(x.tensor(&[1])).output(y.tensor_mut(&[1])).run(&ours).unwrap_err();
    assert!(error.message.starts_with("Put input 0 into memory of lz_alloc"));
    drop(theirs);
    assert_eq!(x[0], 1.0); // a block keeps its connection
}

#[test]
fn views_of_another_size_are_refused() {
    let client = client();
    let x = client.block(&[1.0f32]).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| x.tensor(&[1]).typed(Dtype::Float64))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| x.tensor(&[1]).strided(&[1, 1]))).is_err());
}

#[test]
fn threads_share_a_client() {
    let client = client();
    std::thread::scope(|threads| {
        for thread in 0..4 {
            let client = client.clone();
            threads.spawn(move || {
                for round in 0..20 {
                    let x = client.block(&[thread as f32, round as f32]).unwrap();
                    let mut y = client.zeros::<f32>(2).unwrap();
                    Call::new("silu").input(x.tensor(&[2])).output(y.tensor_mut(&[2])).run(&client).unwrap();
                    assert!((y[1] - silu(round as f32)).abs() < 1e-5);
                }
            });
        }
    });
}

#[test]
fn a_bundle_runs_without_its_function() {
    let client = client();
    let path = std::env::var("LZ_TEST_BUNDLE").expect("tests/c/test_rust.py says it"); // silu(silu(x) @ W) of 6 x 6
    let bundle = Bundle::open(&client, &path).unwrap();
    let shapes = |tensors: Vec<layerzero::BundleTensor>| -> Vec<(String, Vec<i64>)> {
        tensors.into_iter().map(|one| (one.name, one.shape)).collect()
    };
    assert_eq!((bundle.name().as_str(), bundle.inputs()[0].dtype), ("block", Dtype::Float32));
    assert_eq!(shapes(bundle.inputs()), [("x".to_string(), vec![4, 6])]);
    assert_eq!(shapes(bundle.outputs()), [("result".to_string(), vec![4, 6])]);
    assert_eq!(bundle.environments()[0].backend, "alpha");
    let x = client.block(&[0.5f32; 24]).unwrap();
    let mut y = client.zeros::<f32>(24).unwrap();
    drop(client); // it keeps its connection
    let reports = bundle.call().input(x.tensor(&[4, 6])).output(y.tensor_mut(&[4, 6])).run().unwrap();
    let kernels: Vec<&str> = reports.iter().map(|one| one.kernel_id.rsplit('.').next().unwrap()).collect();
    assert_eq!(kernels, ["silu", "matmul", "silu"]);
    for column in 0..6 {
        let sum: f32 = (0..6).map(|row| silu(0.5) * ((row * 6 + column) as f32 * 2.0 / 35.0 - 1.0)).sum();
        assert!((silu(sum) - y[column]).abs() < 1e-5);
    }
    let error = bundle.call().input(x.tensor(&[6, 4])).output(y.tensor_mut(&[4, 6])).run().unwrap_err();
    assert!(error.message.starts_with("Give input 0, x, the dtype and shape"));
}

#[test]
fn structs_are_those_of_the_header() {
    let sizes = [
        std::mem::size_of::<sys::Error>(),
        std::mem::size_of::<sys::ConnectOptions>(),
        std::mem::size_of::<sys::Tensor>(),
        std::mem::size_of::<sys::Attr>(),
        std::mem::size_of::<sys::CallSpec>(),
        std::mem::size_of::<sys::Reason>(),
        std::mem::size_of::<sys::Candidate>(),
        std::mem::size_of::<sys::Attempt>(),
        std::mem::size_of::<sys::Report>(),
        std::mem::size_of::<sys::BundleTensor>(),
        std::mem::size_of::<sys::BundleEnvironment>(),
        std::mem::size_of::<sys::BundleInfo>(),
        std::mem::size_of::<sys::BundleOptions>(),
        std::mem::size_of::<sys::BundleRunSpec>(),
        std::mem::size_of::<sys::BundleReport>(),
    ];
    let named = sizes.iter().map(|size| size.to_string()).collect::<Vec<_>>().join(" ");
    assert_eq!(std::env::var("LZ_TEST_SIZES").expect("tests/c/test_rust.py says it"), named);
}
