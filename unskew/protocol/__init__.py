"""What methods and engines agree on: slots, messages, contexts."""
