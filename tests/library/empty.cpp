// A shared library needs a source of its own.
