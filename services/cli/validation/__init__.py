"""Parts of `penstock validate`."""
