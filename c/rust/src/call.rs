use std::ffi::CString;
use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::{checked, Error};
use crate::memory::{Parts, Tensor, TensorMut};
use crate::report::{self, Report};
use crate::{pointer, sys, text, Client};

/// The value of an attribute.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Attr {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

impl From<bool> for Attr {
    fn from(value: bool) -> Attr {
        Attr::Bool(value)
    }
}

impl From<i64> for Attr {
    fn from(value: i64) -> Attr {
        Attr::Int(value)
    }
}

impl From<f64> for Attr {
    fn from(value: f64) -> Attr {
        Attr::Float(value)
    }
}

impl From<&str> for Attr {
    fn from(value: &str) -> Attr {
        Attr::Text(value.to_string())
    }
}

/// One call, in the op's canonical form (docs/c-api.md): inputs, outputs and attributes in the op's order.
#[must_use]
pub struct Call<'a> {
    op: String,
    inputs: Vec<Option<Parts>>,
    outputs: Vec<TensorMut<'a>>,
    read: Vec<Tensor<'a>>, // keeps what is lent to the call
    attrs: Vec<(String, Attr)>,
    backend: Option<String>,
    timeout: Duration,
}

impl<'a> Call<'a> {
    /// A call of this op.
    pub fn new(op: &str) -> Call<'a> {
        Call {
            op: op.to_string(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            read: Vec::new(),
            attrs: Vec::new(),
            backend: None,
            timeout: Duration::from_secs(0),
        }
    }

    /// The next input.
    pub fn input(mut self, tensor: Tensor<'a>) -> Self {
        self.inputs.push(Some(tensor.parts.clone()));
        self.read.push(tensor);
        self
    }

    /// The next input, which is left out.
    pub fn no_input(mut self) -> Self {
        self.inputs.push(None);
        self
    }

    /// The next output.
    pub fn output(mut self, tensor: TensorMut<'a>) -> Self {
        self.outputs.push(tensor);
        self
    }

    /// The next input and the next output, of an op that writes in place: one tensor.
    pub fn updated(mut self, tensor: TensorMut<'a>) -> Self {
        self.inputs.push(Some(tensor.parts.clone()));
        self.outputs.push(tensor);
        self
    }

    /// An attribute.
    pub fn attr(mut self, name: &str, value: impl Into<Attr>) -> Self {
        self.attrs.push((name.to_string(), value.into()));
        self
    }

    /// The only backend that may serve it.
    pub fn backend(mut self, name: &str) -> Self {
        self.backend = Some(name.to_string());
        self
    }

    /// How long one attempt may take; the broker's own time if this is not said.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Make the call and wait for its end. Tensors must be in memory of this client.
    pub fn run(self, client: &Client) -> Result<Report, Error> {
        let op = text(&self.op)?;
        let backend = self.backend.as_deref().map(text).transpose()?;
        let inputs: Vec<sys::Tensor> =
            self.inputs.iter().map(|parts| parts.as_ref().map_or_else(left_out, Parts::raw)).collect();
        let outputs: Vec<sys::Tensor> = self.outputs.iter().map(|tensor| tensor.parts.raw()).collect();
        let mut texts: Vec<CString> = Vec::new(); // a CString's bytes stay where they are when it moves
        let mut attrs: Vec<sys::Attr> = Vec::new();
        for (name, value) in &self.attrs {
            attrs.push(raw_attr(name, value, &mut texts)?);
        }
        let spec = sys::CallSpec {
            struct_size: std::mem::size_of::<sys::CallSpec>(),
            op: op.as_ptr(),
            inputs: inputs.as_ptr(),
            input_count: inputs.len(),
            outputs: outputs.as_ptr(),
            output_count: outputs.len(),
            attrs: attrs.as_ptr(),
            attr_count: attrs.len(),
            backend: pointer(&backend),
            timeout_s: self.timeout.as_secs_f64(),
        };
        let mut raw = ptr::null_mut();
        let ended = checked(|error| unsafe { sys::lz_call(client.raw(), &spec, &mut raw, error) });
        let report = unsafe { report::taken(raw) };
        match ended {
            Ok(()) => {
                report.ok_or_else(|| Error::new("NO_MEMORY", "Free memory: there is none for a report".to_string()))
            }
            Err(mut error) => {
                if error.code == "UNREACHABLE" || error.code == "BROKER_LOST" || error.code == "BAD_MESSAGE" {
                    for output in &self.outputs {
                        output.is_lent.store(true, Ordering::Relaxed);
                    }
                }
                error.report = report.map(Box::new);
                Err(error)
            }
        }
    }
}

fn left_out() -> sys::Tensor {
    sys::Tensor {
        struct_size: std::mem::size_of::<sys::Tensor>(),
        dtype: 0,
        ndim: 0,
        shape: ptr::null(),
        strides: ptr::null(),
        data: ptr::null_mut(),
        nbytes: 0,
    }
}

fn raw_attr(name: &str, value: &Attr, texts: &mut Vec<CString>) -> Result<sys::Attr, Error> {
    let mut kept = |given: &str| -> Result<*const std::os::raw::c_char, Error> {
        texts.push(text(given)?);
        Ok(texts[texts.len() - 1].as_ptr())
    };
    let mut raw = sys::Attr {
        struct_size: std::mem::size_of::<sys::Attr>(),
        name: kept(name)?,
        kind: 0,
        is_true: false,
        integer: 0,
        number: 0.0,
        text: ptr::null(),
    };
    match value {
        Attr::None => {}
        Attr::Bool(is_true) => {
            raw.kind = 1;
            raw.is_true = *is_true;
        }
        Attr::Int(integer) => {
            raw.kind = 2;
            raw.integer = *integer;
        }
        Attr::Float(number) => {
            raw.kind = 3;
            raw.number = *number;
        }
        Attr::Text(given) => {
            raw.kind = 4;
            raw.text = kept(given)?;
        }
    }
    Ok(raw)
}
