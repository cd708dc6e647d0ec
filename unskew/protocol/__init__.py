"""Interfaces between methods and engines: slots, messages, contexts."""
