use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{checked, Error};
use crate::memory::{Dtype, Parts, Tensor, TensorMut};
use crate::report::{self, text_of, Report};
use crate::{sys, text, Client, Connection};

/// A function's calls as a file, which `lz bundle write` or `lz.write_bundle` has written, with its constants. It keeps
/// its connection open, and is for all threads: one run is under way at a time, others wait.
pub struct Bundle {
    raw: *mut sys::Bundle,
    connection: Arc<Connection>,
}

// The C library lets any number of threads run a bundle, apart from its end, of which there is one.
unsafe impl Send for Bundle {}
unsafe impl Sync for Bundle {}

/// An array that a bundle takes or gives, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleTensor {
    /// Its name.
    pub name: String,
    /// What its numbers are.
    pub dtype: Dtype,
    /// Its extents.
    pub shape: Vec<i64>,
}

/// What the calls of a backend ran in when a bundle was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The backend.
    pub backend: String,
    /// The id of its lock.
    pub env: String,
}

impl Bundle {
    /// Open a bundle. ENV_CHANGED where an environment is locked otherwise than the bundle's, or is not there.
    pub fn open(client: &Client, path: &str) -> Result<Bundle, Error> {
        Bundle::opened(client, path, false)
    }

    /// Open it whatever the environments are: results may then differ within the ops' tolerances.
    pub fn open_any_lock(client: &Client, path: &str) -> Result<Bundle, Error> {
        Bundle::opened(client, path, true)
    }

    fn opened(client: &Client, path: &str, any_lock: bool) -> Result<Bundle, Error> {
        let path = text(path)?;
        let options = sys::BundleOptions { struct_size: std::mem::size_of::<sys::BundleOptions>(), any_lock };
        let mut raw = ptr::null_mut();
        checked(|error| unsafe { sys::lz_bundle_open(client.raw(), path.as_ptr(), &options, &mut raw, error) })?;
        Ok(Bundle { raw, connection: client.0.clone() })
    }

    fn info(&self) -> &sys::BundleInfo {
        unsafe { &*sys::lz_bundle_about(self.raw) }
    }

    /// The function that it was recorded of.
    pub fn name(&self) -> String {
        text_of(self.info().name)
    }

    /// What it takes, in order.
    pub fn inputs(&self) -> Vec<BundleTensor> {
        unsafe { report::items(self.info().inputs, self.info().input_count) }.map(tensor).collect()
    }

    /// What it gives, in order.
    pub fn outputs(&self) -> Vec<BundleTensor> {
        unsafe { report::items(self.info().outputs, self.info().output_count) }.map(tensor).collect()
    }

    /// What its calls ran in when it was written.
    pub fn environments(&self) -> Vec<Environment> {
        unsafe { report::items(self.info().environments, self.info().environment_count) }
            .map(|one| Environment { backend: text_of(one.backend), env: text_of(one.env) })
            .collect()
    }

    /// A run, which is to be given its inputs and outputs.
    pub fn call(&self) -> BundleCall<'_> {
        BundleCall {
            bundle: self,
            inputs: Vec::new(),
            outputs: Vec::new(),
            read: PhantomData,
            timeout: Duration::from_secs(0),
        }
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        let _open = &self.connection; // it is closed after the bundle
        unsafe { sys::lz_bundle_close(self.raw) }
    }
}

fn tensor(one: &sys::BundleTensor) -> BundleTensor {
    let shape: &[i64] =
        if one.ndim == 0 { &[] } else { unsafe { std::slice::from_raw_parts(one.shape, one.ndim as usize) } };
    let dtype = Dtype::of(one.dtype).expect("the library checks what it opens");
    BundleTensor { name: text_of(one.name), dtype, shape: shape.to_vec() }
}

/// One run of a bundle. Tensors are of the dtypes and shapes that it tells, row-major, in memory of its client.
#[must_use]
pub struct BundleCall<'a> {
    bundle: &'a Bundle,
    inputs: Vec<Parts>,
    outputs: Vec<TensorMut<'a>>,
    read: PhantomData<Tensor<'a>>, // keeps what is lent to the run
    timeout: Duration,
}

impl<'a> BundleCall<'a> {
    /// The next input.
    pub fn input(mut self, tensor: Tensor<'a>) -> Self {
        self.inputs.push(tensor.parts);
        self
    }

    /// The next output.
    pub fn output(mut self, tensor: TensorMut<'a>) -> Self {
        self.outputs.push(tensor);
        self
    }

    /// How long one attempt of one call may take; the broker's own time if this is not said.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Run it and wait for its end: how each of its calls went. An error has the report of the call that failed.
    pub fn run(self) -> Result<Vec<Report>, Error> {
        let inputs: Vec<sys::Tensor> = self.inputs.iter().map(Parts::raw).collect();
        let outputs: Vec<sys::Tensor> = self.outputs.iter().map(|tensor| tensor.parts.raw()).collect();
        let spec = sys::BundleRunSpec {
            struct_size: std::mem::size_of::<sys::BundleRunSpec>(),
            inputs: inputs.as_ptr(),
            input_count: inputs.len(),
            outputs: outputs.as_ptr(),
            output_count: outputs.len(),
            timeout_s: self.timeout.as_secs_f64(),
        };
        let mut raw = ptr::null_mut();
        let ended = checked(|error| unsafe { sys::lz_bundle_run(self.bundle.raw, &spec, &mut raw, error) });
        let mut reports = unsafe { taken(raw) };
        match ended {
            Ok(()) => Ok(reports),
            Err(mut error) => {
                if error.code == "UNREACHABLE" || error.code == "BROKER_LOST" || error.code == "BAD_MESSAGE" {
                    for output in &self.outputs {
                        output.is_lent.store(true, Ordering::Relaxed);
                    }
                }
                error.report = reports.pop().map(Box::new);
                Err(error)
            }
        }
    }
}

/// The reports of the calls that were made; the library's are freed.
unsafe fn taken(raw: *mut sys::BundleReport) -> Vec<Report> {
    let mut reports = Vec::new();
    if let Some(found) = raw.as_ref() {
        for number in 0..found.step_count {
            reports.extend((*found.steps.add(number)).as_ref().map(|one| report::of(one)));
        }
        sys::lz_bundle_report_free(raw);
    }
    reports
}
