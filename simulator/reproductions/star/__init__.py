"""STAR (HPDC '26): decode rescheduling by predicted lengths, section 6."""
