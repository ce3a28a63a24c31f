"""The shell around the rescheduler: what it is told, when it decides, and how its orders are carried out."""
