"""The same work in other libraries: ``python -m benchmarks.peers``. One module a library, run in its own interpreter."""
