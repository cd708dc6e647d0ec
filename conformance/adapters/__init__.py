"""One module a library. Each has ``REQUIREMENTS``, ``METHODS`` and ``run``; docs/conformance.md says what they are."""
