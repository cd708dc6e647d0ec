"""FedALS: adaptive local steps."""
