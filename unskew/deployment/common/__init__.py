"""Modules that server, sites and launchers of a deployment share."""
