//! A client of LayerZero's broker: `liblayerzero` with a safe interface, on `std` alone.
//!
//! ```no_run
//! # fn main() -> Result<(), layerzero::Error> {
//! use layerzero::{Call, Client};
//!
//! let client = Client::connect(&Default::default())?;
//! let x = client.block(&[-2.0f32, -1.0, 0.0, 1.0, 2.0, 3.0])?;
//! let mut y = client.zeros::<f32>(6)?;
//! let report = Call::new("silu").input(x.tensor(&[2, 3])).output(y.tensor_mut(&[2, 3])).run(&client)?;
//! println!("{:?} by {}", &y[..], report.kernel_id);
//! # Ok(())
//! # }
//! ```
//!
//! Memory is borrowed for as long as a call runs: inputs cannot be written meanwhile, outputs cannot be read, and no
//! output can overlap anything. A client is for all threads.

#![warn(missing_docs)]

mod bundle;
mod call;
mod error;
mod memory;
mod report;
#[doc(hidden)]
pub mod sys;

pub use bundle::{Bundle, BundleCall, BundleTensor, Environment};
pub use call::{Attr, Call};
pub use error::{Error, Retry};
pub use memory::{Block, Dtype, Element, Tensor, TensorMut};
pub use report::{Attempt, Candidate, Reason, Report};

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

/// How to connect. Fields that are `None` are looked for as `layerzero.h` says.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder of the broker's sockets.
    pub runtime_dir: Option<String>,
    /// File of the stack's secret.
    pub secret_file: Option<String>,
    /// File of libzmq.
    pub libzmq: Option<String>,
}

/// The connection; it is closed when the last block and the last clone of its client are gone.
pub(crate) struct Connection(*mut sys::Client);

// The C library lets any number of threads use a client at once, apart from its end, of which there is one.
unsafe impl Send for Connection {}
unsafe impl Sync for Connection {}

impl Drop for Connection {
    fn drop(&mut self) {
        unsafe { sys::lz_close(self.0) }
    }
}

/// A connection to this user's broker. Clones are the same connection.
#[derive(Clone)]
pub struct Client(pub(crate) Arc<Connection>);

impl Client {
    /// Connect to a broker that runs; none is started.
    pub fn connect(options: &Options) -> Result<Client, Error> {
        let version = unsafe { sys::lz_abi_version() };
        if version != sys::ABI_VERSION {
            let text = format!("Build this crate against its own liblayerzero: ABI {version} is linked");
            return Err(Error::new("VERSION_MISMATCH", text));
        }
        let runtime_dir = optional(&options.runtime_dir)?;
        let secret_file = optional(&options.secret_file)?;
        let libzmq = optional(&options.libzmq)?;
        let given = sys::ConnectOptions {
            struct_size: std::mem::size_of::<sys::ConnectOptions>(),
            runtime_dir: pointer(&runtime_dir),
            secret_file: pointer(&secret_file),
            libzmq: pointer(&libzmq),
        };
        let mut client = ptr::null_mut();
        error::checked(|error| unsafe { sys::lz_connect(&given, &mut client, error) })?;
        Ok(Client(Arc::new(Connection(client))))
    }

    /// Shared memory with these numbers.
    pub fn block<T: Element>(&self, numbers: &[T]) -> Result<Block<T>, Error> {
        let mut block = self.zeros(numbers.len())?;
        block.copy_from_slice(numbers);
        Ok(block)
    }

    /// Shared memory of so many zeros.
    pub fn zeros<T: Element>(&self, count: usize) -> Result<Block<T>, Error> {
        Block::new(self, count)
    }

    pub(crate) fn raw(&self) -> *mut sys::Client {
        (self.0).0
    }
}

pub(crate) fn text(given: &str) -> Result<CString, Error> {
    CString::new(given).map_err(|_| Error::new("INVALID_ARGUMENT", format!("Take the zero byte out of {given:?}")))
}

fn optional(given: &Option<String>) -> Result<Option<CString>, Error> {
    given.as_deref().map(text).transpose()
}

pub(crate) fn pointer(given: &Option<CString>) -> *const std::os::raw::c_char {
    given.as_ref().map_or(ptr::null(), |text| text.as_ptr())
}
