"""One module per library, with ``REQUIREMENTS``, ``METHODS`` and ``run``, see docs/conformance.md."""
