"""Adapters: ``run()`` returns the outputs of a library's own code on the inputs of ``conformance.trust.inputs``, by name."""
