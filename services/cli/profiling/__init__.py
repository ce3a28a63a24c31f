"""Parts of `penstock profile`: what is run, how, and what is made of it."""
