"""Cost models fitted to measurements: operator tables, step tables, a live instance's profile."""
