"""The simulator against measurements of real engines, error by error."""
