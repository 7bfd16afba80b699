"""The exceptions of kvq, one for each status of the C interface."""


class Error(Exception):
    """A call of kvq that failed. Its text is one sentence with the numbers in it. Nothing has changed, unless the function says so."""

    status = 8


class ArgumentError(Error, ValueError):
    """A value out of range, a shape that does not fit, or an unknown name."""

    status = 1


class HandleError(Error, ValueError):
    """An object that was closed, or that belongs to another cache."""

    status = 2


class StructError(Error, RuntimeError):
    """The package does not fit the library."""

    status = 3


class OutOfMemoryError(Error, MemoryError):
    """There is no memory, or the byte budget of the cache would be exceeded."""

    status = 4


class DataError(Error, ValueError):
    """A file or a message is damaged, does not fit the cache, or cannot be read or written."""

    status = 5


class CallbackError(Error, RuntimeError):
    """A callback reported a failure."""

    status = 6


class UnsupportedError(Error, NotImplementedError):
    """The library was built without what the function needs, or the memory of a tensor is not that of the cache."""

    status = 7


class CudaError(Error, RuntimeError):
    """The CUDA runtime reported an error; the text names it."""

    status = 9


class InternalError(Error, RuntimeError):
    """A mistake of kvq."""


BY_STATUS = {
    c.status: c
    for c in (ArgumentError, HandleError, StructError, OutOfMemoryError, DataError, CallbackError, UnsupportedError,
              CudaError)
}
