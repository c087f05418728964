use std::ffi::CStr;
use std::os::raw::c_char;

use crate::sys;

/// How a call went.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The kernel that served it; empty when none did.
    pub kernel_id: String,
    /// Its backend.
    pub backend: String,
    /// The process that ran it.
    pub worker_pid: i64,
    /// What the kernel took in its worker.
    pub kernel_ns: u64,
    /// Which attempt that was, from 1.
    pub attempt: u32,
    /// So long it waited for workers to start.
    pub waited_s: f64,
    /// Of inputs that were made contiguous, because the best kernel takes no others.
    pub copied_bytes: usize,
    /// What failed before, oldest first.
    pub attempts: Vec<Attempt>,
    /// Kernels that were looked at: best first, then those that refused.
    pub candidates: Vec<Candidate>,
    /// Of an op whose results have sizes that depend on the data: the leading extent of each.
    pub sizes: Vec<u64>,
    /// How it went: "broker", or "express", straight to the worker.
    pub path: String,
}

/// What failed before a call ended.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The backend that was tried.
    pub backend: String,
    /// Its kernel.
    pub kernel_id: String,
    /// The process that it was tried in.
    pub worker_pid: i64,
    /// The error's code.
    pub code: String,
    /// The error, in words.
    pub detail: String,
    /// The signal that ended the worker, if one did.
    pub exit_signal: Option<i32>,
    /// The exit code of a worker that ended by itself.
    pub exit_code: Option<i32>,
    /// What the worker was doing when it died, or empty.
    pub phase: String,
}

/// A kernel that was looked at.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The kernel.
    pub kernel_id: String,
    /// Its backend.
    pub backend: String,
    /// Whether it can serve the call.
    pub is_accepted: bool,
    /// What it was ranked by, the highest first.
    pub score: Option<f64>,
    /// What its calls have taken here.
    pub measured_us: Option<f64>,
    /// Why it cannot.
    pub reasons: Vec<Reason>,
}

/// Why a kernel did not accept a call.
#[derive(Clone, Debug)]
pub struct Reason {
    /// A code of docs/capabilities.md.
    pub code: String,
    /// The offending and the allowed value.
    pub detail: String,
    /// A command or change besides the call, or empty.
    pub repair: String,
}

pub(crate) fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The items of an array of structs, by the size that the library says they have.
pub(crate) unsafe fn items<'a, T: 'a>(first: *const T, count: usize) -> impl Iterator<Item = &'a T> {
    let size = if count == 0 { 0 } else { *(first as *const usize) };
    (0..count).map(move |at| &*((first as *const u8).add(at * size) as *const T))
}

/// The library's report as one of ours; the library's is freed. None of none.
pub(crate) unsafe fn taken(raw: *mut sys::Report) -> Option<Report> {
    let report = of(raw.as_ref()?);
    sys::lz_report_free(raw);
    Some(report)
}

/// One of ours with the same in it.
pub(crate) unsafe fn of(found: &sys::Report) -> Report {
    let sizes = if found.size_count == 0 { &[][..] } else { std::slice::from_raw_parts(found.sizes, found.size_count) };
    Report {
        kernel_id: text_of(found.kernel_id),
        backend: text_of(found.backend),
        worker_pid: found.worker_pid,
        kernel_ns: found.kernel_ns,
        attempt: found.attempt,
        waited_s: found.waited_s,
        copied_bytes: found.copied_bytes,
        attempts: items(found.attempts, found.attempt_count).map(attempt).collect(),
        candidates: items(found.candidates, found.candidate_count).map(|one| candidate(one)).collect(),
        sizes: sizes.to_vec(),
        path: path_of(found),
    }
}

/// An older library's report ends before it, and all of its calls go by the broker.
unsafe fn path_of(found: &sys::Report) -> String {
    let begin: *const sys::Report = found;
    let end = std::ptr::addr_of!((*begin).path).wrapping_add(1);
    if found.struct_size < end as usize - begin as usize {
        return "broker".to_owned();
    }
    text_of(found.path)
}

fn attempt(one: &sys::Attempt) -> Attempt {
    Attempt {
        backend: text_of(one.backend),
        kernel_id: text_of(one.kernel_id),
        worker_pid: one.worker_pid,
        code: text_of(one.code_name),
        detail: text_of(one.detail),
        exit_signal: Some(one.exit_signal).filter(|number| *number != 0),
        exit_code: Some(one.exit_code).filter(|number| *number != -1),
        phase: text_of(one.phase),
    }
}

unsafe fn candidate(one: &sys::Candidate) -> Candidate {
    let reasons = items(one.reasons, one.reason_count).map(|reason| Reason {
        code: text_of(reason.code),
        detail: text_of(reason.detail),
        repair: text_of(reason.repair),
    });
    Candidate {
        kernel_id: text_of(one.kernel_id),
        backend: text_of(one.backend),
        is_accepted: one.is_accepted,
        score: Some(one.score).filter(|_| one.has_score),
        measured_us: Some(one.measured_us).filter(|_| one.has_measured),
        reasons: reasons.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_an_older_library_is_read_to_its_end() {
        let mut found: sys::Report = unsafe { std::mem::zeroed() };
        found.kernel_id = b"k\0".as_ptr().cast();
        found.backend = b"b\0".as_ptr().cast();
        found.path = b"express\0".as_ptr().cast();
        found.struct_size = std::mem::size_of::<sys::Report>();
        assert_eq!(unsafe { of(&found) }.path, "express");
        found.path = std::ptr::NonNull::dangling().as_ptr();
        found.struct_size -= std::mem::size_of::<*const c_char>();
        assert_eq!(unsafe { of(&found) }.path, "broker");
    }
}
