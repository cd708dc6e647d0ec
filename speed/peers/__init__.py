"""The same work in other libraries: ``python -m speed.peers``. One module a library, run in its own interpreter."""
