"""STAR's rescheduler attached to a simulated cluster: the live decision over modelled instances."""
