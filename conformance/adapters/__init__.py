"""One module per library, with ``REQUIREMENTS``, ``METHODS`` and ``run``, see docs/results/conformance.md."""
