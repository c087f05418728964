//! `layerzero.h` by hand. What each thing means is said there.

use std::os::raw::{c_char, c_void};

pub const ABI_VERSION: u32 = 1;
pub const MAX_NEEDED: usize = 8;
pub const MESSAGE_BYTES: usize = 4096;

#[repr(C)]
pub struct Client {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct Error {
    pub struct_size: usize,
    pub code: i32,
    pub retry: i32,
    pub needed_count: u32,
    pub needed: [u64; MAX_NEEDED],
    pub message: [c_char; MESSAGE_BYTES],
}

#[repr(C)]
pub struct ConnectOptions {
    pub struct_size: usize,
    pub runtime_dir: *const c_char,
    pub secret_file: *const c_char,
    pub libzmq: *const c_char,
}

#[repr(C)]
pub struct Tensor {
    pub struct_size: usize,
    pub dtype: i32,
    pub ndim: u32,
    pub shape: *const i64,
    pub strides: *const i64,
    pub data: *mut c_void,
    pub nbytes: usize,
}

#[repr(C)]
pub struct Attr {
    pub struct_size: usize,
    pub name: *const c_char,
    pub kind: i32,
    pub is_true: bool,
    pub integer: i64,
    pub number: f64,
    pub text: *const c_char,
}

#[repr(C)]
pub struct CallSpec {
    pub struct_size: usize,
    pub op: *const c_char,
    pub inputs: *const Tensor,
    pub input_count: usize,
    pub outputs: *const Tensor,
    pub output_count: usize,
    pub attrs: *const Attr,
    pub attr_count: usize,
    pub backend: *const c_char,
    pub timeout_s: f64,
}

#[repr(C)]
pub struct Reason {
    pub struct_size: usize,
    pub code: *const c_char,
    pub detail: *const c_char,
    pub repair: *const c_char,
}

#[repr(C)]
pub struct Candidate {
    pub struct_size: usize,
    pub kernel_id: *const c_char,
    pub backend: *const c_char,
    pub is_accepted: bool,
    pub has_score: bool,
    pub has_measured: bool,
    pub score: f64,
    pub measured_us: f64,
    pub reasons: *const Reason,
    pub reason_count: usize,
}

#[repr(C)]
pub struct Attempt {
    pub struct_size: usize,
    pub backend: *const c_char,
    pub kernel_id: *const c_char,
    pub worker_pid: i64,
    pub code: i32,
    pub exit_signal: i32,
    pub exit_code: i32,
    pub code_name: *const c_char,
    pub detail: *const c_char,
    pub phase: *const c_char,
}

#[repr(C)]
pub struct Report {
    pub struct_size: usize,
    pub kernel_id: *const c_char,
    pub backend: *const c_char,
    pub worker_pid: i64,
    pub kernel_ns: u64,
    pub attempt: u32,
    pub waited_s: f64,
    pub copied_bytes: usize,
    pub attempts: *const Attempt,
    pub attempt_count: usize,
    pub candidates: *const Candidate,
    pub candidate_count: usize,
    pub sizes: *const u64,
    pub size_count: usize,
    pub path: *const c_char,
}

#[repr(C)]
pub struct Bundle {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct BundleTensor {
    pub struct_size: usize,
    pub name: *const c_char,
    pub dtype: i32,
    pub ndim: u32,
    pub shape: *const i64,
    pub nbytes: u64,
}

#[repr(C)]
pub struct BundleEnvironment {
    pub struct_size: usize,
    pub backend: *const c_char,
    pub env: *const c_char,
}

#[repr(C)]
pub struct BundleInfo {
    pub struct_size: usize,
    pub name: *const c_char,
    pub made_by: *const c_char,
    pub made_s: f64,
    pub inputs: *const BundleTensor,
    pub input_count: usize,
    pub outputs: *const BundleTensor,
    pub output_count: usize,
    pub environments: *const BundleEnvironment,
    pub environment_count: usize,
    pub step_count: usize,
    pub constant_bytes: u64,
    pub slot_bytes: u64,
}

#[repr(C)]
pub struct BundleOptions {
    pub struct_size: usize,
    pub any_lock: bool,
}

#[repr(C)]
pub struct BundleRunSpec {
    pub struct_size: usize,
    pub inputs: *const Tensor,
    pub input_count: usize,
    pub outputs: *const Tensor,
    pub output_count: usize,
    pub timeout_s: f64,
}

#[repr(C)]
pub struct BundleReport {
    pub struct_size: usize,
    pub steps: *const *const Report,
    pub step_count: usize,
}

extern "C" {
    pub fn lz_abi_version() -> u32;
    pub fn lz_code_name(code: i32) -> *const c_char;
    pub fn lz_connect(options: *const ConnectOptions, client: *mut *mut Client, error: *mut Error) -> i32;
    pub fn lz_close(client: *mut Client);
    pub fn lz_alloc(client: *mut Client, nbytes: usize, data: *mut *mut c_void, error: *mut Error) -> i32;
    pub fn lz_free(client: *mut Client, data: *mut c_void, error: *mut Error) -> i32;
    pub fn lz_call(client: *mut Client, call: *const CallSpec, report: *mut *mut Report, error: *mut Error) -> i32;
    pub fn lz_report_free(report: *mut Report);
    pub fn lz_bundle_open(
        client: *mut Client,
        path: *const c_char,
        options: *const BundleOptions,
        bundle: *mut *mut Bundle,
        error: *mut Error,
    ) -> i32;
    pub fn lz_bundle_close(bundle: *mut Bundle);
    pub fn lz_bundle_about(bundle: *const Bundle) -> *const BundleInfo;
    pub fn lz_bundle_run(
        bundle: *mut Bundle,
        run: *const BundleRunSpec,
        report: *mut *mut BundleReport,
        error: *mut Error,
    ) -> i32;
    pub fn lz_bundle_report_free(report: *mut BundleReport);
}
