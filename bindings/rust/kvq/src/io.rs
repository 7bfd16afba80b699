//! Readers and writers as callbacks. Their errors and panics do not cross the library.
use std::{
    any::Any,
    io::{self, Read, Write},
    os::raw::c_void,
    panic::{catch_unwind, resume_unwind, AssertUnwindSafe},
};

use kvq_sys as sys;

use crate::error::{Error, Result};

enum Failed {
    Error(io::Error),
    Panic(Box<dyn Any + Send>),
}

struct State<'a, T: ?Sized> {
    of: &'a mut T,
    failed: Option<Failed>,
}

impl<T: ?Sized> State<'_, T> {
    fn run<R>(&mut self, otherwise: R, f: impl FnOnce(&mut T) -> io::Result<R>) -> R {
        if self.failed.is_some() {
            return otherwise;
        }
        match catch_unwind(AssertUnwindSafe(|| f(self.of))) {
            Ok(Ok(result)) => return result,
            Ok(Err(e)) => self.failed = Some(Failed::Error(e)),
            Err(panic) => self.failed = Some(Failed::Panic(panic)),
        }
        otherwise
    }
    fn end<R>(self, what: &str, result: Result<R>) -> Result<R> {
        match self.failed {
            None => result,
            Some(Failed::Error(e)) => Err(Error::callback(format!("{}: {}", what, e))),
            Some(Failed::Panic(panic)) => resume_unwind(panic),
        }
    }
}

unsafe extern "C" fn write(user: *mut c_void, data: *const c_void, bytes: usize) -> i32 {
    let state = &mut *(user as *mut State<&mut dyn FnMut(&[u8]) -> io::Result<()>>);
    let part = if bytes == 0 {
        &[][..]
    } else {
        std::slice::from_raw_parts(data as *const u8, bytes)
    };
    state.run(1, |to| to(part).map(|()| 0))
}
unsafe extern "C" fn read(user: *mut c_void, to: *mut c_void, bytes: usize) -> usize {
    let state = &mut *(user as *mut State<&mut dyn Read>);
    if bytes == 0 {
        return 0;
    }
    // Readers may look at what they write to.
    std::ptr::write_bytes(to as *mut u8, 0, bytes);
    let part = std::slice::from_raw_parts_mut(to as *mut u8, bytes);
    state.run(0, |from| loop {
        match from.read(part) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|n| n.min(bytes)),
        }
    })
}

/// Hands the bytes of each call to `each`.
pub(crate) fn with_callback(
    mut each: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    f: impl FnOnce(sys::kvq_write, *mut c_void) -> Result<()>,
) -> Result<()> {
    let mut state = State {
        of: &mut each,
        failed: None,
    };
    let result = f(Some(write), &mut state as *mut State<_> as *mut c_void);
    state.end("the writer failed", result)
}
pub(crate) fn with_writer(to: &mut dyn Write, f: impl FnOnce(sys::kvq_write, *mut c_void) -> Result<()>) -> Result<()> {
    with_callback(&mut |part| to.write_all(part), f)
}
pub(crate) fn with_reader<R>(
    mut from: &mut dyn Read,
    f: impl FnOnce(sys::kvq_read, *mut c_void) -> Result<R>,
) -> Result<R> {
    let mut state = State {
        of: &mut from,
        failed: None,
    };
    let result = f(Some(read), &mut state as *mut State<_> as *mut c_void);
    state.end("the reader failed", result)
}
