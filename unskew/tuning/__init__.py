"""Fair tuning of several methods: the same trials, rounds and data, judged on the clients' held-out samples."""
