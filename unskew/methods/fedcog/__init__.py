"""FedCOG: consensus-oriented generation."""
