"""What `penstock simulate` and `penstock compare` share: one simulation's plan, its run, its options."""
