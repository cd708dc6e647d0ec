"""One session of a deployed run at the server."""
