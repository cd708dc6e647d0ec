"""Command-line interface: commands, options, and terminal output."""
