"""Every method tuned alike: the same trials, rounds and data, judged by what clients hold out."""
