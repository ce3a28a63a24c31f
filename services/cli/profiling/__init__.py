"""Parts of `penstock profile`: what it runs, how it measures, and how it fits a profile."""
