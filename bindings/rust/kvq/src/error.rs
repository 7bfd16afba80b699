//! Statuses as errors, and the conversion of arguments.
use std::{
    ffi::{CStr, CString},
    fmt,
    os::raw::c_char,
    ptr,
};

use kvq_sys as sys;

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// A value out of range, a shape that does not fit, or an unknown name.
    Argument,
    /// An object of another cache.
    Handle,
    /// This crate does not fit the library.
    Struct,
    /// There is no memory, or the byte budget of the cache would be exceeded.
    Memory,
    /// A file or a message is damaged, does not fit the cache, or cannot be read or written.
    Data,
    /// A reader or a writer failed.
    Callback,
    /// The library was built without what the function needs.
    Unsupported,
    /// A mistake of kvq.
    Internal,
}

/// A status and one sentence with the numbers in it.
#[derive(Clone, Debug)]
pub struct Error {
    status: Status,
    message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn argument(message: String) -> Self {
        Error {
            status: Status::Argument,
            message: format!("kvq: {}", message),
        }
    }
    pub(crate) fn memory(message: String) -> Self {
        Error {
            status: Status::Memory,
            message: format!("kvq: {}", message),
        }
    }
    pub(crate) fn callback(message: String) -> Self {
        Error {
            status: Status::Callback,
            message: format!("kvq: {}", message),
        }
    }
    pub fn status(&self) -> Status {
        self.status
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
impl std::error::Error for Error {}

/// The status of a call on this thread, and its message.
pub(crate) fn check(status: sys::kvq_status) -> Result<()> {
    if status == sys::KVQ_OK {
        return Ok(());
    }
    let message = unsafe { CStr::from_ptr(sys::kvq_last_error()) }
        .to_string_lossy()
        .into_owned();
    let status = match status {
        sys::KVQ_ERROR_ARGUMENT => Status::Argument,
        sys::KVQ_ERROR_HANDLE => Status::Handle,
        sys::KVQ_ERROR_STRUCT => Status::Struct,
        sys::KVQ_ERROR_MEMORY => Status::Memory,
        sys::KVQ_ERROR_DATA => Status::Data,
        sys::KVQ_ERROR_CALLBACK => Status::Callback,
        sys::KVQ_ERROR_UNSUPPORTED => Status::Unsupported,
        _ => Status::Internal,
    };
    Err(Error { status, message })
}

/// A struct of C with all members zero, and its size.
pub(crate) unsafe fn zeroed<T>() -> T {
    std::mem::zeroed()
}
macro_rules! init {
    ($type:ident { $($member:ident: $value:expr),* $(,)? }) => {{
        #[allow(unused_mut)]
        let mut made: kvq_sys::$type = unsafe { crate::error::zeroed() };
        made.size = std::mem::size_of::<kvq_sys::$type>();
        $(made.$member = $value;)*
        made
    }};
}
pub(crate) use init;

/// An object of the library, freed when it is dropped.
macro_rules! handle {
    ($(#[$attribute:meta])* $name:ident, $raw:ident, $free:ident) => {
        $(#[$attribute])*
        #[derive(Debug)]
        pub struct $name(std::ptr::NonNull<kvq_sys::$raw>);

        impl $name {
            /// Makes it with a function that writes a pointer where it is told.
            #[allow(dead_code)]
            pub(crate) fn make(
                f: impl FnOnce(*mut *mut kvq_sys::$raw) -> kvq_sys::kvq_status,
            ) -> crate::Result<Self> {
                let mut raw = std::ptr::null_mut();
                crate::error::check(f(&mut raw))?;
                Ok($name(std::ptr::NonNull::new(raw).expect("kvq returned NULL")))
            }
            #[allow(dead_code)]
            pub(crate) fn raw(&self) -> *mut kvq_sys::$raw {
                self.0.as_ptr()
            }
        }
        impl Drop for $name {
            fn drop(&mut self) {
                unsafe { kvq_sys::$free(self.0.as_ptr()) };
            }
        }
        // The library says: functions that take a const handle may run together on it, others not.
        unsafe impl Send for $name {}
        unsafe impl Sync for $name {}
    };
}
pub(crate) use handle;

/// What a function writes to its last argument.
pub(crate) fn ask<T: Copy + Default>(f: impl FnOnce(*mut T) -> sys::kvq_status) -> Result<T> {
    let mut value = T::default();
    check(f(&mut value))?;
    Ok(value)
}

pub(crate) fn int(n: usize, what: &str) -> Result<i32> {
    i32::try_from(n).map_err(|_| Error::argument(format!("{} is {}, more than {}", what, n, i32::MAX)))
}
/// A number of tokens where None is the default of C, and 0 is none of them.
pub(crate) fn count(n: Option<usize>, what: &str) -> Result<i32> {
    match n {
        None => Ok(0),
        Some(0) => Ok(sys::KVQ_NONE),
        Some(n) => int(n, what),
    }
}
/// A number of bytes, pages or entries where None is no limit (0 in C).
pub(crate) fn limit(n: Option<usize>, what: &str) -> Result<usize> {
    match n {
        Some(0) => Err(Error::argument(format!(
            "{} is 0, which must be at least 1, or None",
            what
        ))),
        _ => Ok(n.unwrap_or(0)),
    }
}

/// A name as C takes it; None is NULL.
pub(crate) struct Text(Option<CString>);
impl Text {
    pub(crate) fn new(name: &str) -> Result<Self> {
        let text = CString::new(name).map_err(|_| Error::argument(format!("the name {:?} has a zero in it", name)))?;
        Ok(Text(Some(text)))
    }
    pub(crate) fn optional<S: AsRef<str>>(name: Option<S>) -> Result<Self> {
        name.map_or(Ok(Text(None)), |n| Text::new(n.as_ref()))
    }
    pub(crate) fn as_ptr(&self) -> *const c_char {
        self.0.as_ref().map_or(ptr::null(), |t| t.as_ptr())
    }
}

/// The text of a handle that is not freed.
pub(crate) fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
