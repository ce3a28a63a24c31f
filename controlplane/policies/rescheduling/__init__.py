"""Moving running requests between decode instances: STAR's rescheduler (section 5, Algorithm 1)."""
