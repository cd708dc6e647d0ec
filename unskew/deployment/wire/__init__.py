"""Messages between server and sites: what is sent, and how it is validated."""
