"""Images, recordings and films in prompts: found in messages, fetched, and expanded by a worker."""
