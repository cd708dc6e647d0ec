"""The round: who takes part, what is trained, what arrives, what is kept."""
