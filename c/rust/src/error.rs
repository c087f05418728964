use std::fmt;

use crate::report::{text_of, Report};
use crate::sys;

/// May another attempt help?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retry {
    /// No.
    Never,
    /// The same call again.
    Same,
    /// Elsewhere only: name another backend, or none.
    OtherBackend,
}

/// What went wrong.
#[derive(Clone, Debug)]
pub struct Error {
    /// A code of docs/protocol.md, section 9: "BROKER_LOST".
    pub code: String,
    /// May another attempt help?
    pub retry: Retry,
    /// The first line says what to do, the rest why.
    pub message: String,
    /// Of OUTPUT_TOO_SMALL: the leading extent that each output needs.
    pub needed: Vec<u64>,
    /// How a call went until it failed, if the broker said.
    pub report: Option<Box<Report>>,
}

impl Error {
    pub(crate) fn new(code: &str, message: String) -> Error {
        Error { code: code.to_string(), retry: Retry::Never, message, needed: Vec::new(), report: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Error {}

/// Call a function of the library; its error if it has one.
pub(crate) fn checked(function: impl FnOnce(*mut sys::Error) -> i32) -> Result<(), Error> {
    let mut said = Box::new(sys::Error {
        struct_size: std::mem::size_of::<sys::Error>(),
        code: 0,
        retry: 0,
        needed_count: 0,
        needed: [0; sys::MAX_NEEDED],
        message: [0; sys::MESSAGE_BYTES],
    });
    let code = function(&mut *said);
    if code == 0 {
        return Ok(());
    }
    Err(Error {
        code: text_of(unsafe { sys::lz_code_name(code) }),
        retry: match said.retry {
            1 => Retry::Same,
            2 => Retry::OtherBackend,
            _ => Retry::Never,
        },
        message: text_of(said.message.as_ptr()),
        needed: said.needed.iter().take(said.needed_count as usize).copied().collect(),
        report: None,
    })
}
